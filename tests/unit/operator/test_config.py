"""The operator's settings: promised defaults, and what is refused."""

import pytest

from drakit.settings import parse_address
from drakit_operator.config import Config, ConfigError, read_config


def test_the_promised_defaults():
    config = read_config(None)
    assert config == Config()
    assert (config.listen.probes, config.listen.metrics) == ("[::]:8081", "[::]:8080")
    election = config.election
    assert (election.lease_name, election.lease_duration) == ("drakit-operator", 15.0)
    assert (election.renew_deadline, election.retry_period) == (10.0, 2.0)
    assert config.resync_period == 300
    assert config.events.name_holders == "namespace"
    assert (config.events.repeat_pause, config.events.patience) == (1800, 300)


def test_a_file_is_read(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "logging: {level: DEBUG, format: text}\nresyncPeriod: 2m\nevents: {debounce: 500ms}\n"
    )
    config = read_config(path)
    assert (config.logging.level, config.resync_period, config.events.debounce) == (
        "DEBUG",
        120,
        0.5,
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("threads: 3", "threads", id="unknown-key"),
        pytest.param("election: {lease: x}", "election.lease", id="unknown-nested-key"),
        pytest.param("resyncPeriod: soon", "soon", id="no-duration"),
        pytest.param("resyncPeriod: 0s", "resyncPeriod", id="zero-duration"),
        pytest.param(f"resyncPeriod: {'9' * 14}h", "resyncPeriod", id="a-duration-without-end"),
        pytest.param("listen: 2001-99-99", "is not YAML", id="no-date"),
        pytest.param("listen: {probes: here}", "host:port", id="no-address"),
        pytest.param("events: {nameHolders: none}", "nameHolders", id="unknown-holders"),
        pytest.param("[1, 2]", "top level", id="a-list"),
        pytest.param("{", "is not YAML", id="no-yaml"),
        pytest.param("election: {renewDeadline: 16s}", "leaseDuration", id="deadline-after-lease"),
        pytest.param("election: {renewDeadline: 15s}", "leaseDuration", id="deadline-at-the-end"),
        pytest.param("election: {retryPeriod: 10s}", "renewDeadline", id="retry-after-deadline"),
    ],
)
def test_what_is_refused_is_named(tmp_path, text, told):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_config(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert told in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read"):
        read_config(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("[::]:8080", (None, 8080)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        (":9", (None, 9)),
    ],
)
def test_addresses(text, pair):
    assert parse_address(text) == pair
