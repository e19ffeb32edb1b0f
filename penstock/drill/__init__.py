"""A deployment under load whose processes, cables and disks are broken again and again, and what its clients saw of it.

    faults.py      what is broken, and when: a seeded schedule that leaves enough of a deployment whole
    hosts.py       hosts that are namespaces of this machine, with cables and disks of their own
    launched.py    a real `penstock up`, started here: its processes by name, what it logs, how to signal one of them
    strikes.py     how each kind of fault is done and undone
    holdings.py    what a deployment holds: descriptors, ports, blocks, memory; and what is left of it at its end
    outcome.py     what clients saw, compared with a run that nothing disturbed
    run.py         the drill itself
    page.py        its result as a page
    replay.py      apart from drills: recorded requests run again by what serves them, and their tokens compared

Only what a drill has started itself is ever broken.
"""
