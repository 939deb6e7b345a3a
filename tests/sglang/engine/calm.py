"""Keep SGLang's data-parallel controller from spinning.

Its event loop asks its socket without waiting, all the time: a core an engine, of the two that the tests have.
"""

import time

PAUSE_S = 0.002


def install():
    import zmq
    from sglang.srt.managers import data_parallel_controller as controller

    receive = getattr(controller, "sock_recv", None)
    if receive is None:  # releases before 0.5.23 receive in another way
        return

    def patient(sock, *args, **named):
        try:
            return receive(sock, *args, **named)
        except zmq.Again:
            time.sleep(PAUSE_S)
            raise

    controller.sock_recv = patient
