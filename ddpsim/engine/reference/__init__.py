"""The plain model, the only room that knows SimPy: an event for every message of every rank.

- `simulation`: ranks and network wired, and run until every rank is done
- `rank`: one rank, which carries instructions out
- `stream`: a device's compute stream
- `comm_lane`: a rank's collectives, in the order of their launch
- `network`: where ranks meet for a collective
- `messages`: a collective message by message
- `shared_link`: a link that several transfers share, and work whose rate changes
"""
