"""The models of the zoo as modules of torch alone, to be timed where nothing else is installed."""
