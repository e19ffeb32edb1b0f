"""A discrete-event simulator of a whole cluster, for policies: an hour of traffic of a few instances in less than a
minute, without a device.

What decides is what decides in production: `service.master.Master`, the policies of `sched.cluster`, and on every
instance the `Scheduler`, `BlockPool` and `Handoffs` of `sched.local` and `kv`. Modelled are step times, the latency of
messages and blocks, arrivals, output lengths, and failures. A function of its arguments: equal scenarios and seeds give
equal results, to the byte.

    simulate.py   one simulation, from a scenario to its result
    scenario.py   what is simulated, from a YAML file
    workload.py   which traffic it asks for, and slices of it; traffic.py: the requests
    baselines/    policies that others are compared with
    cluster.py    everything together on one timeline (events.py)
    frontend.py   the clients' side, and the record of what each request saw
    slots.py      instances by name; instance.py: one engine, with real scheduling and modelled time
    steps.py      how long steps take; repeat.py: what a scheduler need not do in steps that repeat
    wires.py      how long messages and blocks travel
    result.py     the result; report.py, page.py, svg.py: the same as pages
    search.py     the greatest load at which targets are kept; bound.py: an upper bound on what any policy can keep
    plan.py       deployments of given devices, what each should do, and the cheapest that keeps a target
    replay.py     recorded decisions, made again by another policy
"""
