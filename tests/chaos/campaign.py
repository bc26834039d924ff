"""The whole attack: an undisturbed run, then clients on a server that is hurt all the time, then the verdict."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.chaos.client import STOP
from tests.chaos.figures import Part, describe
from tests.chaos.killer import Killer
from tests.chaos.ledger import read_rounds
from tests.chaos.on_ray import BucketAway, KeptCluster, PairOnRay, RayVictim
from tests.chaos.target import Target
from tests.chaos.troubles import NOT_HERE, DatabaseCut, SmallDisk, SteppedClock, Trouble
from tests.chaos.verdict import Expected, check_files, check_processes, check_rounds, check_store
from tests.chaos.victim import OFTEN_SNAPSHOTS, ROOT, Victim
from tests.end_to_end.balancer import LoadBalancer
from tests.server.bucket import BUCKET, running_bucket
from tests.server.postgres import Postgres
from tests.server.tiny_models import save_model

FINISH_SECONDS = 300.0
"""How long the clients may take for the rounds they are in, after the last fault."""

Crew = Mapping[str, Sequence[str]]
"""The programs of each client process, by its package."""

ALONE: Crew = {"tinsmith": ["marathon"]}
COMPANY: Crew = {
    "tinsmith": ["patient", "hasty", "in_turns", "sampling"],
    "tinker": ["patient", "hasty", "in_turns", "sampling"],
    "http": ["by_hand"],
}
UNDISTURBED: Crew = {"tinsmith": ["patient", "hasty", "in_turns", "sampling"], "http": ["by_hand"]}


@dataclass
class Campaign:
    folder: Path
    random: Random
    say: Callable[[str], None] = print

    def prepare(self) -> None:
        """Makes the base model and finds out what every program gives when nobody disturbs it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._model = save_model(self.folder / "model", "qwen3", vocab_size=256, max_position_embeddings=256)
        calm = Victim(self.folder / "calm", self._model)
        ledgers = self.folder / "calm-ledgers"
        ledgers.mkdir()
        try:
            calm.bring_back()
            for crew in (ALONE, UNDISTURBED):  # one after the other, so that the first is alone indeed
                _finish(_clients(crew, calm.url, ledgers, rounds=1))
            complaints = calm.end()
        finally:
            calm.destroy()
        rounds = read_rounds(ledgers)
        complaints += [f"{each.name}: {each.error}" for each in rounds if not each.is_over]
        assert not complaints, complaints
        self._expected = Expected(rounds, calm.checkpoints)

    def alone(self, kills: int) -> Part:
        """One model, one operation at a time, and snapshots as seldom as they are: long replays, equal to the bit."""
        victim = Victim(self.folder / "alone", self._model)
        return self._part("alone", victim, ALONE, Killer(victim, self.random, say=self.say), kills, exactly=True)

    def company(self, kills: int, *, on_postgres: bool = False) -> Part:
        """All programs with all clients at once, snapshots often, and every trouble that can be made here."""
        name = "company-on-postgres" if on_postgres else "company"
        with ExitStack() as stack:
            troubles: list[Trouble] = []
            postgres = stack.enter_context(Postgres()) if on_postgres else None
            if postgres is not None:
                troubles.append(DatabaseCut(postgres))
            victim = Victim(
                self._folder_to_fill(name, stack, troubles) / "state",
                self._model,
                command=OFTEN_SNAPSHOTS,
                database=postgres.new_database() if postgres is not None else "",
                environment=self._clock_to_step(troubles),
                log=self.folder / f"{name}.log",
            )
            return self._part(
                name, victim, COMPANY, Killer(victim, self.random, troubles, self.say), kills, exactly=False
            )

    def on_ray(self, kills: int, trainers: int) -> Part:
        """The same with two servers behind a load balancer, their workers on a cluster, which is hurt, too, and
        everything else in PostgreSQL and a bucket.

        What nobody disturbed is still the server of one machine: a cluster may not give anything else.
        """
        name = "company-on-ray"
        with ExitStack() as stack:
            postgres = stack.enter_context(Postgres())
            bucket = stack.enter_context(running_bucket())  # before the cluster, whose workers have to know it
            cluster = stack.enter_context(KeptCluster())
            troubles: list[Trouble] = [DatabaseCut(postgres), BucketAway(bucket)]
            folder, database = self._folder_to_fill(name, stack, troubles), postgres.new_database()
            environments = {"one": self._clock_to_step(troubles), "two": {}}  # machines need not agree on the time
            servers = [
                RayVictim(
                    folder / which,
                    self._model,
                    cluster,
                    storage=f"s3://{BUCKET}/chaos",
                    trainers=trainers,
                    command=OFTEN_SNAPSHOTS,
                    database=database,
                    environment=environment,
                    log=self.folder / f"{name}-{which}.log",
                )
                for which, environment in environments.items()
            ]
            balancer = stack.enter_context(LoadBalancer([server.url for server in servers]))
            pair = PairOnRay(servers, balancer.url, cluster, self.random)
            killer = Killer(pair, self.random, troubles, self.say)
            return self._part(name, pair, COMPANY, killer, kills, exactly=False)

    def _folder_to_fill(self, name: str, stack: ExitStack, troubles: list[Trouble]) -> Path:
        folder = self.folder / name
        folder.mkdir()
        try:
            troubles.append(stack.enter_context(SmallDisk(folder)))
        except NOT_HERE as error:
            self.say(f"The disk is not filled, because no small one can be mounted: {error}")
        return folder

    def _clock_to_step(self, troubles: list[Trouble]) -> Mapping[str, str]:
        try:
            clock = SteppedClock(self.folder, self.random)
        except NOT_HERE as error:
            self.say(f"The clock is not stepped, because the library for it cannot be compiled: {error}")
            return {}
        troubles.append(clock)
        return clock.environment

    def _part(self, name: str, victim: Target, crew: Crew, killer: Killer, kills: int, *, exactly: bool) -> Part:
        ledgers = self.folder / f"{name}-ledgers"
        ledgers.mkdir()
        clients: list[subprocess.Popen[bytes]] = []
        try:
            victim.bring_back()
            started = time.monotonic()
            clients = _clients(crew, victim.url, ledgers, rounds=0)
            killer.campaign(kills)
            (ledgers / STOP).touch()
            complaints = _finish(clients) + victim.end()
            seconds = time.monotonic() - started
            rounds = read_rounds(ledgers)
            complaints += check_rounds(rounds, self._expected, victim.checkpoints, exactly=exactly)
            complaints += check_store(rounds, victim.database) + check_processes(victim) + _left_files(victim)
            part = Part(name, killer.kills, killer.counts, rounds, seconds, victim.starts, victim.log(), complaints)
        finally:
            for client in clients:
                client.kill()
                client.wait()
            victim.destroy()
        self.say(describe(part))
        return part


def _left_files(victim: Target) -> list[str]:
    """What a worker left that was killed is gone after the next start of the server, if not before."""
    if not check_files(victim):
        return []
    victim.bring_back()
    return victim.end() + check_files(victim)


def _clients(crew: Crew, url: str, folder: Path, rounds: int) -> list[subprocess.Popen[bytes]]:
    """A process for each package; what it has to say about retries goes to a file beside its ledgers."""
    clients = []
    for package, programs in crew.items():
        command = [sys.executable, "-m", "tests.chaos.client", package, url, str(folder), str(rounds), *programs]
        with (folder / f"{package}.log").open("ab") as log:
            clients.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
    return clients


def _finish(clients: Sequence[subprocess.Popen[bytes]]) -> list[str]:
    """Waits for the clients; complains about those that hang, and ends them."""
    end, complaints = time.monotonic() + FINISH_SECONDS, []
    for client in clients:
        try:
            client.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            client.kill()
            complaints.append(f"a client did not end within {FINISH_SECONDS:.0f} s of the last fault: {client.args!r}")
    return complaints
