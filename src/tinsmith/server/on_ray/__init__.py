"""Workers as actors of a Ray cluster.

    lives      in the API process: workers as `lives.py` has them, wherever they are
    bridge     a process below it, the driver of the cluster: does what it is told, tells what it hears
    cluster    connecting and placement; refusals has what is refused
    actor      on any machine of the cluster: a worker, as in `worker_run.py`
    member     on any other: a process that shares the training of a worker, placed by it
    speaking   the thread of either, and what it says
    messages   what the API process and the bridge tell each other

The API process does not load Ray: a cluster that goes away takes its drivers with it, and they can be started again.
"""
