"""Members of a training group as actors of a Ray cluster, each with a bundle of its own, on any machine.

The leader places them: they are its own, so that Ray ends them when it is gone. What they say is fetched by it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from tinsmith._version import __version__
from tinsmith.errors import ConfigError
from tinsmith.server import member_lives
from tinsmith.server.member_lives import Ending, MemberLife, MemberLives
from tinsmith.server.messages import MemberSettings, Message
from tinsmith.server.on_ray.refusals import other_version, reason
from tinsmith.server.on_ray.speaking import Begun, Heard, Speaker
from tinsmith.server.process_life import WORKER_ENVIRONMENT
from tinsmith.server.suspects import UNSEEN

log = logging.getLogger(__name__)

TELL_SECONDS = 5.0


class MemberActor:
    def __init__(self, settings: bytes) -> None:
        self._settings = msgspec.json.decode(settings, type=MemberSettings)
        self._speaker = Speaker(self._work)

    async def begin(self) -> Begun:
        return self._speaker.begin()

    async def heard(self) -> Heard:
        return await self._speaker.heard()

    def _work(self) -> None:
        from tinsmith.server.engine.channels import LostPeerError
        from tinsmith.server.member_process import run

        settings = msgspec.structs.replace(self._settings, host=ray.util.get_node_ip_address())
        whose = {"base_model": settings.base_model, "worker": f"rank {settings.rank}"}
        self._speaker.configure_logs(settings.log_format, settings.log_level, **whose)
        try:
            run(settings)
        except LostPeerError as lost:
            log.warning("%s", lost)
            raise SystemExit(1) from lost
        except ConfigError as error:
            self._speaker.tell(Message(failed=str(error), is_final=True))
            raise SystemExit(1) from error
        except Exception as error:
            self._speaker.tell(Message(failed=f"{type(error).__name__}: {error}"))
            raise


class MembersOnRay(MemberLives):
    """`options` say where each of them goes; what they log is given to `note_log`, what they wait for to `tell`."""

    are_here = False

    def __init__(
        self,
        options: Sequence[Mapping[str, Any]],
        tell: Callable[[Message], None],
        note_log: Callable[[str], None],
    ) -> None:
        self.host = ray.util.get_node_ip_address()
        self._options = options
        self._tell = tell
        self._note_log = note_log

    def begin(self, settings: MemberSettings) -> MemberLife:
        return _RayMember(settings, self._options[settings.rank - 1], self._tell, self._note_log)


class _RayMember(MemberLife):
    def __init__(
        self,
        settings: MemberSettings,
        options: Mapping[str, Any],
        tell: Callable[[Message], None],
        note_log: Callable[[str], None],
    ) -> None:
        self._rank = settings.rank
        self._tell = tell
        self._note_log = note_log
        self._ending: Ending | None = None
        actor = ray.remote(MemberActor).options(max_restarts=0, runtime_env={"env_vars": WORKER_ENVIRONMENT}, **options)
        self._actor: Any = actor.remote(msgspec.json.encode(settings))

    def begun(self) -> member_lives.Begun | None:
        try:
            begun = self._patiently_begun()
        except RayError as error:
            self._ending = self._lost(error)
            return None
        if begun.version != __version__:
            self.kill()
            self._ending = Ending(1, other_version(begun.version, begun.where), is_final=True)
            return None
        return member_lives.Begun(begun.where, begun.process)

    def _patiently_begun(self) -> Begun:
        waiting = self._actor.begin.remote()
        while not ray.wait([waiting], timeout=TELL_SECONDS)[0]:
            self._tell(
                Message(
                    held_up=f"rank {self._rank} of the training group waits for room on the Ray cluster, or for its "
                    "process to start there"
                )
            )
        begun: Begun = ray.get(waiting)
        return begun

    def ended(self) -> Ending:
        if self._ending is None:
            try:
                self._ending = self._followed()
            except RayError as error:
                self._ending = self._lost(error)
        return self._ending

    def _followed(self) -> Ending:
        """To its end."""
        last_words = Message()
        while True:
            heard: Heard = ray.get(self._actor.heard.remote())
            for line in heard.log_lines:
                self._note_log(line)
            for message in heard.messages:
                last_words = msgspec.json.decode(message, type=Message)
            if heard.status is not None:
                return Ending(heard.status, last_words.failed, last_words.is_final)

    def _lost(self, error: RayError) -> Ending:
        return Ending(UNSEEN, f"its actor is gone: {reason(error)}")

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # it is gone already, or the cluster is
            ray.kill(self._actor)
