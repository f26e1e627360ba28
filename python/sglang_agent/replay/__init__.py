"""A recorded batch against real serving (section 5.1 of arXiv:2611.16661).

Same initial context, same order of stages, same output lengths, recorded environment
durations and responses; inference is the server's own. The runner, the gates and the
clients are those of a live run: a replay only brings other conversations.
"""

from sglang_agent.replay.batch import ReplaySettings, replay

__all__ = ["ReplaySettings", "replay"]
