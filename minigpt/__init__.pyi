"""The public names and their homes: see __init__.py."""

from minigpt.decoding.params import SamplingParams as SamplingParams
from minigpt.decoding.sequence import Completion as Completion
from minigpt.decoding.sequence import Failure as Failure
from minigpt.decoding.sequence import Step as Step
from minigpt.decoding.sequence import TokenLogprob as TokenLogprob
from minigpt.decoding.streams import Stream as Stream
from minigpt.errors import CheckpointError as CheckpointError
from minigpt.errors import DeviceError as DeviceError
from minigpt.errors import MiniGPTError as MiniGPTError
from minigpt.errors import ModelNotFoundError as ModelNotFoundError
from minigpt.errors import PromptError as PromptError
from minigpt.errors import TokenizerError as TokenizerError
from minigpt.language_model import LanguageModel as LanguageModel
from minigpt.language_model import save as save
from minigpt.loading import load as load
from minigpt.network.cache import KVCache as KVCache
from minigpt.network.config import GPT2Config as GPT2Config
from minigpt.network.device import usable_cpus as usable_cpus
from minigpt.network.model import GPT2 as GPT2
from minigpt.network.model import MultiHeadAttention as MultiHeadAttention
from minigpt.scoring import Score as Score
from minigpt.text.tokenizer import Tokenizer as Tokenizer

__version__: str
