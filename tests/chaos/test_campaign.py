"""A small campaign: real servers and clients, a few kills, and a full disk where one can be made."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.chaos.campaign import Campaign


def test_nothing_is_lost_however_the_server_dies(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, Random(5))
    campaign.prepare()
    parts = [campaign.alone(kills=2), campaign.company(kills=4)]
    assert [complaint for part in parts for complaint in part.complaints] == []
    assert sum(part.kills for part in parts) >= 6
