"""LAB_STEPS=FILE: what keeps the scheduler thread between two model steps, one line a step: when it ended and how long it took, seconds.

`process_batch_result` is where finished requests are gathered, pickled and sent; requests in the batch wait meanwhile.
"""

import os
import pathlib
import time


def install():
    path = os.environ.get("LAB_STEPS")
    if not path:
        return
    from sglang.srt.managers.scheduler import Scheduler

    process = Scheduler.process_batch_result

    def timed(self, *args, **named):
        began = time.perf_counter()
        try:
            return process(self, *args, **named)
        finally:
            took = time.perf_counter() - began
            with pathlib.Path(path).open("a") as out:
                out.write(f"{time.time():.6f} {took:.6f}\n")

    Scheduler.process_batch_result = timed
