"""Transfer of KV blocks between engines, and shared memory that outlives them. Blocks and layouts, no tensors.

Memory that outlives an engine:

    memory.py           the blocks of a pool, as bytes in a memfd
    records.py          what each block contains, in a second memfd
    pool.py             an engine's blocks: memory of its own, or a share of the KV pool server's
    kv_pool_server.py   the server that owns the pools of a host
    kv_pool_client.py   an engine's end of it

Blocks that are kept elsewhere, for all engines:

    stores.py           the menu of stores, by URL (store_url.py)
    block_store.py      what every store does: put, get and find blocks, verified, in bounded time (bounded.py)
    directory.py, mooncake_store.py   those that there are: files that hosts share (files.py), or memory of many hosts

Blocks that move between engines:

    transports.py       what every transport does, and the menu of them
    shared.py, tcp.py, mooncake.py   those that there are: one host's pool, bytes over sockets, or Mooncake's engine
    finished.py         moves that are over, from the threads that made them
    carrier.py          links between engines, over which messages and bytes go; io_thread.py, the thread it is on
    faulty.py           a carrier that loses, delays, duplicates and corrupts frames
    peer_link.py        one link and its sockets
    frames.py           what lies on a socket, and how its two ends authenticate each other
    addresses.py        where a socket leads
"""
