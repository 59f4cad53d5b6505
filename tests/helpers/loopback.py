"""Plain HTTP servers on this machine, for clients that are to be tried against them."""

import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer


@contextmanager
def listening(handler, **state):
    """A server of this handler on a free port, with `state` as its attributes; gone at the end of the block."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    for name, value in state.items():
        setattr(http, name, value)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield http
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
