"""The ranks of a job: started, joined, told what the others say."""
