"""All-reduce algorithms: the messages of each, and closed forms of their time."""
