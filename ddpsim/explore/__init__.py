"""The live page of `ddpsim explore`: questions in, answers as JSON out, and who serves them."""
