"""Workers as actors of a Ray cluster.

    lives      in the API process: workers as `lives.py` has them, wherever they are
    bridge     a process below it, the driver of the cluster: starts and ends what it is told to, tells how it ended
    cluster    connecting and placement; refusals has what is refused
    actor      on any machine of the cluster: a worker, as in `worker_run.py`
    member     on any other: a process that shares the training of a worker, placed by it
    line       between the API process and a worker: that there is work, and what it says
    speaking   the thread of either, its log and its end
    messages   what the API process and the bridge tell each other

The API process does not load Ray: a cluster that goes away takes its drivers with it, and they can be started again.
"""
