"""What travels between processes: msgpack, one tagged message a frame; never pickle.

    engine.py   frontend, master  <->  engine
    master.py   frontend  <->  master
    handoff.py  engine  <->  engine
    kv_pool.py  engine  <->  KV pool server

An *instance* is an engine's place in a deployment and has a name; an *incarnation* is one life of it, a number that no
other life has. What is meant for one life is never believed by another. A *generation* counts the attempts to run one
request: what belongs to an earlier attempt is dropped.
"""

PROTOCOL = 7
