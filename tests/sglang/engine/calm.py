"""Keep SGLang's data-parallel controller from spinning.

Its event loop asks its socket without waiting, all the time: a core an engine, of the two that the tests have.
"""

import time

PAUSE_S = 0.002


def install():
    import zmq
    from sglang.srt.managers import data_parallel_controller as controller

    def patient(receive):
        def received(sock, *args, **named):
            try:
                return receive(sock, *args, **named)
            except zmq.Again:
                time.sleep(PAUSE_S)
                raise

        return received

    if hasattr(controller, "sock_recv"):
        controller.sock_recv = patient(controller.sock_recv)
        return
    # Older releases ask the socket itself. Only the loop's process may become patient: schedulers ask theirs between steps.
    kind = controller.DataParallelController
    loop = kind.event_loop

    def event_loop(self):
        zmq.Socket.recv_pyobj = patient(zmq.Socket.recv_pyobj)
        return loop(self)

    kind.event_loop = event_loop
