"""Capacity as EC2 says it, through the real boto3 client: windows, offerings, what is said when it does not answer."""

import json

import dagster as dg
import pytest
from ec2_server import at, ec2_server, offering, reservation
from fakes import FakedWorkspace
from typer.testing import CliRunner

from assets.capacity import capacity_windows
from pipelines import cli
from warmers.errors import CapacityUnavailable, ConfigError

NOON = at(0).timestamp()


class StoppedClock:
    """Noon of 7 December 2026, and what a test adds."""

    ahead = 0.0

    def now(self):
        return NOON + self.ahead


@pytest.fixture(scope="module")
def ec2():
    with ec2_server() as served:
        yield served


@pytest.fixture
def state(ec2, monkeypatch):
    """What EC2 knows: nothing at first."""
    url, state = ec2
    for name, value in {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}.items():
        monkeypatch.setenv(name, value)
    for known in vars(state).values():
        known.clear()
    return state


@pytest.fixture
def open_workspace(workspace_file):
    def opened(**capacity):
        settings = json.loads(workspace_file.read_text())
        settings["fleets"][0]["capacity"] = {"region": "us-east-1", "instance_types": ["p5.48xlarge"], **capacity}
        workspace_file.write_text(json.dumps(settings))
        workspace = FakedWorkspace(workspace_file, on_event=lambda _: None)
        workspace.__dict__["clock"] = StoppedClock()
        return workspace

    return opened


def test_windows_of_every_page_and_state(state, open_workspace):
    state.reservations += [
        reservation("cr-now"),
        reservation("cr-ultra", instance_type="p5.48xlarge", end=20),
        reservation("cr-later", "scheduled", start=30, end=54),
        reservation("cr-unpaid", "payment-pending", start=2, end=26),
        reservation("cr-other", instance_type="g5.xlarge"),
        reservation("cr-open", kind="default", end=None),
    ]
    state.blocks += [{"CapacityBlockId": "cb", "UltraserverType": "u-p6e", "CapacityReservationIds": ["cr-ultra"]}]
    state.extensions += [{"CapacityReservationId": "cr-now", "CapacityBlockExtensionStatus": "payment-pending"}]
    document = open_workspace().capacity("chat").document()
    windows = {window["reservation"]: window for window in document["windows"]}
    assert windows.keys() == {"cr-now", "cr-ultra", "cr-later", "cr-unpaid", "cr-open"}
    assert state.calls.count("describe_capacity_reservations") == 3
    assert windows["cr-now"]["drains_at"] == "2026-12-08T11:20:00Z"
    assert windows["cr-now"]["admits_until"] == "2026-12-08T10:35:00Z"
    assert windows["cr-now"]["note"] == "an extension is payment-pending"
    assert windows["cr-ultra"]["drains_at"] == "2026-12-08T06:50:00Z"
    assert (windows["cr-unpaid"]["usable"], windows["cr-open"]["admits_until"]) == (False, None)
    assert windows["cr-later"]["opens_at"] == "2026-12-08T18:00:00Z"
    assert document["roll_out_at"] == document["at"] == "2026-12-07T12:00:00Z"


def test_an_end_that_moved_is_read_again(state, open_workspace):
    workspace = open_workspace()
    state.reservations.append(reservation("cr-1", end=1))
    assert workspace.capacity("chat").admission is None
    state.reservations[0] = reservation("cr-1", end=25)
    assert workspace.capacity("chat").admission.at == NOON


def test_offerings_by_what_a_usable_hour_costs_and_the_command_that_buys(state, open_workspace):
    state.offerings += [
        offering("cbo-dear", "943.6800"),
        offering("cbo-cheap", "900.0000"),
        offering("cbo-short", "9", hours=1),
    ]
    found = open_workspace().capacity("chat", offerings=True).document()["offerings"]
    assert [one["offering"] for one in found] == ["cbo-cheap", "cbo-dear", "cbo-short"]
    assert (found[0]["fee"], found[0]["currency"], found[0]["usable_hours"]) == ("900.0000", "USD", 22.58)
    assert found[0]["fee_per_usable_accelerator_hour"] == f"{900 / (8 * (22 + 35 / 60)):.4f}"
    assert found[2]["fee_per_usable_accelerator_hour"] is None
    assert "purchase-capacity-block --region us-east-1 --capacity-block-offering-id cbo-cheap" in found[0]["buy"]
    assert not any("purchase" in call for call in state.calls)


def test_throttling_is_waited_for_and_what_stays_away_is_said(state, open_workspace):
    workspace = open_workspace()
    state.faults += ["RequestLimitExceeded"] * 2
    assert workspace.capacity("chat").windows == ()
    state.faults += ["InternalError"] * 9
    with pytest.raises(CapacityUnavailable, match=r"describe_capacity_reservations in us-east-1: InternalError"):
        workspace.capacity("chat")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("UnauthorizedOperation", "Allow the role ec2:DescribeCapacityReservations"),
        ("InvalidParameterValue", "Correct capacity"),
    ],
)
def test_what_somebody_has_to_change_is_said(state, open_workspace, code, says):
    state.faults.append(code)
    with pytest.raises(ConfigError, match=f"{code}.*{says}"):
        open_workspace().capacity("chat")


def test_the_asset_shows_them(state, open_workspace):
    state.reservations += [reservation("cr-now"), reservation("cr-open", kind="default", end=None)]
    workspace = open_workspace(off_peak=[{"since": "22:00", "until": "06:00"}])
    done = dg.materialize([capacity_windows], partition_key="chat", resources={"workspace": workspace})
    metadata = done.asset_materializations_for_node("capacity_windows")[0].metadata
    assert (metadata["usable"].value, metadata["roll_out_at"].value) == (2, "2026-12-07T22:00:00Z")
    assert len(metadata["windows"].records) == 2


def test_the_command_line_says_when_and_with_2_that_there_is_no_time(state, open_workspace, monkeypatch):
    workspace = open_workspace()
    monkeypatch.setattr(cli, "_workspace", lambda: workspace)
    state.reservations.append(reservation("cr-1"))
    done = CliRunner().invoke(cli.app, ["windows"])
    assert (done.exit_code, "A roll-out may begin now." in done.stdout, "cr-1" in done.stdout) == (0, True, True)
    workspace.clock.ahead = 23 * 3600.0
    state.offerings.append(offering("cbo-1", "900.0000"))
    done = CliRunner().invoke(cli.app, ["windows", "--offerings"])
    assert done.exit_code == 2
    assert "leaves a roll-out its 45 minutes" in done.stdout
    assert "900.0000 USD" in done.stdout
    assert json.loads(CliRunner().invoke(cli.app, ["windows", "--json"]).stdout)["roll_out_at"] is None


def test_a_fleet_without_capacity_is_told_what_to_give(workspace_file, monkeypatch):
    workspace = FakedWorkspace(workspace_file, on_event=lambda _: None)
    monkeypatch.setattr(cli, "_workspace", lambda: workspace)
    error = CliRunner().invoke(cli.app, ["windows"]).exception
    assert isinstance(error, ConfigError)
    assert "it names none. Give it capacity.region" in str(error)
