"""Every error warmfront raises on purpose, in one tree.

WarmfrontError
├── PermanentError            a retry would see the same
│   ├── ConfigError           a field of warmfront.yaml
│   │   └── NotStaged         a model whose weights nobody has staged yet
│   ├── TemplateError         one template file, or what rendering it gave
│   ├── RequestError          a captured request that is none
│   ├── WeightsError          a model's files: incomplete, damaged, or not to be loaded
│   ├── BucketRefused         a bucket of weights: name, permissions, credentials
│   ├── EngineRefused         the engine or the daemon answered 4xx
│   └── EngineMismatch        the engine or daemon is not of this fleet's namespace
└── TransientError            a later try may succeed
    ├── EngineUnavailable     the engine or the daemon answered 5xx
    │   └── EngineLost        unreachable, no answer in time, or stuck: asking it again will not help
    ├── StoreUnavailable      L2 does not answer
    ├── StateUnavailable      the state store does not answer
    ├── SourceUnavailable     a source of templates or weights does not answer
    │   └── SourceChanged     it changed while it was read
    ├── BucketUnavailable     a bucket of weights does not answer
    ├── CapacityUnavailable   EC2 does not say what capacity there is
    ├── LeaseHeld             another writer warms this namespace
    ├── LeaseLost             ours expired, or was taken over
    ├── NotWarm               chunks did not appear in L2 before the deadline
    └── ProcessDied           a process of the local stack ended by itself
"""


class WarmfrontError(Exception):
    """What was attempted, on what; what was seen; what to do next."""

    def __init__(self, attempted: str, *, seen: str, do: str) -> None:
        self.attempted, self.seen, self.do = attempted, seen, do
        super().__init__(f"{attempted}: {seen.rstrip('.')}. {do}")


class PermanentError(WarmfrontError):
    """A retry would see the same: somebody has to change something first."""


class TransientError(WarmfrontError):
    """A later try may succeed with nothing changed."""


class ConfigError(PermanentError):
    """A field of warmfront.yaml, or the file itself."""


class NotStaged(ConfigError):
    """A fleet streams its weights, and there is no stage of them yet."""


class TemplateError(PermanentError):
    """One template: its file, its placeholders, or what the engine said of its rendering."""


class RequestError(PermanentError):
    """A file that holds no chat or completion request."""


class WeightsError(PermanentError):
    """A model's files are incomplete or damaged, or nobody should load them."""


class BucketRefused(PermanentError):
    """A bucket of weights refused: its name, the permissions or the credentials are wrong."""


class EngineRefused(PermanentError):
    """The engine or the daemon understood the request and refused it."""


class EngineMismatch(PermanentError):
    """The engine or the daemon is not what the fleet's namespace says."""


class EngineUnavailable(TransientError):
    """The engine or the daemon cannot do it now, as it says itself (5xx), or is lost."""


class EngineLost(EngineUnavailable):
    """The engine or the daemon is unreachable, gives no answer in time, or is stuck: another one is needed."""


class StoreUnavailable(TransientError):
    """L2 does not answer."""


class StateUnavailable(TransientError):
    """The state store does not answer, or refuses a write."""


class SourceUnavailable(TransientError):
    """A fleet's templates or weights cannot be listed or read."""


class SourceChanged(SourceUnavailable):
    """A file of weights is another one than it was when reading it began."""


class BucketUnavailable(TransientError):
    """A bucket of weights does not answer."""


class CapacityUnavailable(TransientError):
    """EC2 does not answer, or asks to wait."""


class LeaseHeld(TransientError):
    """Another writer holds the namespace."""


class LeaseLost(TransientError):
    """The lease expired or was taken over while work was under way."""


class NotWarm(TransientError):
    """Chunks did not appear in L2 before the deadline."""


class ProcessDied(TransientError):
    """A process of the local stack ended by itself, or never became healthy."""
