"""The two ways a run can stop before its end, other than by a mistake (which is a ValueError)."""

import signal


class NonFinite(RuntimeError):
    """Loss or gradient became NaN or infinite; weights, optimizer and EMA are those before the bad step."""


class Interrupted(Exception):
    """A signal asked for the end; the state was saved where that was possible."""

    def __init__(self, signal_number: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_code = 128 + signal_number
