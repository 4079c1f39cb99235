"""Every error that minigpt raises on purpose. A message is one sentence or two: what was wrong, and what to do."""


class MiniGPTError(Exception):
    """The base of all errors below: catch it to catch whatever a model, a file, a prompt or a device can do wrong."""


class CheckpointError(MiniGPTError):
    """A checkpoint's files are missing, damaged, or describe a model that this engine does not implement."""


class ModelNotFoundError(MiniGPTError):
    """No model of that name: not a folder, not in the cache, not on the hub, or the hub cannot be reached."""


class TokenizerError(MiniGPTError):
    """The vocabulary is missing or damaged, or the model has none and text was given or asked for."""


class DeviceError(MiniGPTError):
    """The device does not exist here, or does not support the dtype asked for."""


class PromptError(MiniGPTError, ValueError):
    """The prompt cannot be used: too long, ids outside the vocabulary, the wrong type."""


class NoTokenError(MiniGPTError):
    """The parameters bar every token: there is none left to draw."""
