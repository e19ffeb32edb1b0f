"""A discrete-event simulator of a whole cluster, for policies: an hour of traffic of a few instances in less than a
minute, without a device.

What decides is what decides in production: `service.master.Master`, the policies of `sched.cluster`, and on every
instance the `Scheduler`, `BlockPool` and `Handoffs` of `sched.local` and `kv`. What is modelled is what those cannot
decide: how long a step takes, how long a message or a block travels, when clients come and when outputs end, what
breaks. A function of its arguments: equal scenarios and seeds give equal results, to the byte.

    simulate.py   one simulation, from a scenario to its result
    scenario.py   what is simulated, from a YAML file
    workload.py   which traffic it asks for; traffic.py: the requests; prompts.py: their tokens
    cluster.py    everything together on one timeline
    frontend.py   the clients' side, and the record of what each request saw
    instance.py   one engine: real scheduling, modelled time
    pace.py       how long steps take
    stride.py     many equal decode steps at once
    wires.py      how long messages and blocks travel between instances
    events.py     what happens next
    result.py     what came of it; report.py, page.py, svg.py: the same as pages
    search.py     the greatest load at which targets are kept; bound.py: what nobody could do better than
    plan.py       the cheapest deployment of given devices
    replay.py     recorded decisions, made again by another policy
"""
