"""Events of the running batch, for metrics."""


class Watcher:
    """Receives a batcher's events, on its thread; this base class ignores them. Seconds count from
    a request's arrival."""

    def admitted(self, waited: float) -> None:
        """A request got its slots."""

    def begun(self, prompt_tokens: int, reused_tokens: int, seconds: float) -> None:
        """A prompt was prefilled, except for its cached prefix, and its first token chosen."""

    def stepped(self, tokens: int) -> None:
        """A decoding step generated one token for each of this many branches."""

    def drafted(self, tokens: int, accepted: int) -> None:
        """A draft of this many tokens was verified, and the first `accepted` of them accepted."""

    def holds(self, running: int, waiting: int, kv_tokens: int) -> None:
        """The load between two steps: running branches, waiting requests, cached tokens."""
