"""Messages between processes: msgpack, one tagged message a frame; never pickle.

    engine.py   frontend, master  <->  engine
    master.py   frontend, launcher  <->  master
    handoff.py  engine  <->  engine
    kv_pool.py  engine  <->  KV pool server
    rank.py     rank 0 of an engine  <->  its other ranks

An *instance* is the place of an engine in a deployment and has a name; an *incarnation* is one run of its process, with
a unique number. Messages for one incarnation are refused by every other. A *generation* counts the attempts to run one
request: what belongs to an earlier attempt is dropped.
"""

PROTOCOL = 19
