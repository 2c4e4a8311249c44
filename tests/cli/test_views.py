"""The command `report`, and what stands on the terminal."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from dg_lightning.cli import main

ROOT = Path(__file__).parents[2]
OPTIONS = ["--config", "digits/dynamicgate", "--trainer.max_epochs=2"]


def program(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # A client of W&B in this process may have left the address of its service there.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-m", "dg_lightning", *args],
        cwd=folder,
        env={**clean, "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("in_empty_folder")
def test_a_fit_ends_with_its_figures_and_the_way_on_and_quietly_with_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    main(["fit", *OPTIONS])
    said = capsys.readouterr().out
    for line in (
        r"epochs, optimizer steps +2, 42",
        r"validation accuracy +\d\d\.\d\d%",
        r"executed MACs per sample +[\d,]+",
        r"relative to dense +\d+\.\d\d%",
        r"open units +\d+\.\d\d%",
        r"net\.hidden\.0\.gate +\d+\.\d\d%",
        r"dg-lightning report runs/digits/dynamicgate/version_0",
    ):
        assert re.search(line, said), line
    # Loss, accuracy, open rate and MACs stand beside the progress bar.
    for key in ("train/loss", "val/accuracy", "gates/open_rate", "compute/macs_share"):
        assert f"{key}: " in said
    main(["fit", *OPTIONS, "--quiet"])
    main(["test", *OPTIONS, "--quiet"])
    main(["report", "runs/digits/dynamicgate", "--quiet"])
    assert capsys.readouterr().out == ""
    page = (tmp_path / "runs" / "digits" / "dynamicgate" / "report.html").read_text()
    # The newest training, with the test of its checkpoint, which has a folder of its own.
    assert "<h1>digits/dynamicgate</h1>" in page
    assert "runs/digits/dynamicgate/version_1</p>" in page
    for part in ("test accuracy", "Confusion matrix", "Compute by layer", "Gate of hidden layer 2"):
        assert part in page, part
    main(["report", "runs/digits/dynamicgate/version_0", "--output", "elsewhere/a.html"])
    assert "The report is elsewhere/a.html." in capsys.readouterr().out
    first = (tmp_path / "elsewhere" / "a.html").read_text()
    assert "test accuracy" not in first  # its checkpoint was not tested


@pytest.mark.usefixtures("in_empty_folder")
def test_a_run_without_any_logger_has_a_report_too(tmp_path: Path) -> None:
    main(["fit", *OPTIONS, "--trainer.logger=false", "--quiet"])
    main(["report", "--config", "digits/dynamicgate", "--quiet"])
    page = (tmp_path / "runs" / "digits" / "dynamicgate" / "report.html").read_text()
    assert "Open rate: hard gates g" in page
    assert "Units over time" in page


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["report", "nowhere"], "No run found at 'nowhere'"),
        (["report", "."], "'.' contains neither a study (results.csv with a variant column) nor"),
        (["report"], "folder"),
        (["report", "--wandb=me"], "`wandb` must be entity/project, got 'me'"),
        (["report", ".", "--wandb=me/p"], "reports on a project: leave out `run`"),
        (["report", ".", "--by_variant"], "`--by_variant` needs `--wandb entity/project`"),
    ],
)
@pytest.mark.usefixtures("in_empty_folder")
def test_mistakes_are_answered_by_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_without_a_server_the_workspace_is_a_file_and_a_way_to_apply_it(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces", reason="needs the extra wandb")
    done = program(
        tmp_path, "report", "--wandb=me/p", "--by_variant",
        WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="0" * 40,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "wandb_workspace.json. To save it in W&B, run `wandb login`" in done.stderr
    written = json.loads((tmp_path / "wandb_workspace.json").read_text())
    check_workspace(written["entity"], written["project"], written["spec"], True)


def check_workspace(entity: str, project: str, spec: Any, by_variant: bool) -> None:
    assert (entity, project) == ("me", "p")
    sections = spec["section"]["panelBankConfig"]["sections"]
    panels = {part["name"]: json.dumps(part["panels"]) for part in sections}
    assert "gates/open_rate/.*" in panels["Open rates by layer"]
    assert "gates/pictures" in panels["Heat maps"]
    assert "compute/macs_share" in panels["Accuracy against compute"]
    assert "val/accuracy" in panels["Accuracy against compute"]
    assert "collapse/.*" in panels["Collapse"]
    assert "rewiring/density/.*" in panels["Connections"]
    assert "routing/entropy/.*" in panels["Experts"]
    assert "tasks/accuracy/.*" in panels["Tasks"]
    grouped = [key["name"] for run_set in spec["section"]["runSets"] for key in run_set["grouping"]]
    assert grouped == (["group"] if by_variant else [])
    drawn = [panel["config"] for part in sections for panel in part["panels"]]
    means = [config for config in drawn if config.get("groupAgg") == "mean"]
    assert len(means) > 15
    assert all(config["groupArea"] == "stddev" for config in means)


class Server(BaseHTTPRequestHandler):
    """As much of a W&B server as the client needs to save a view."""

    asked: list[Any]

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/graphql":
            self.asked.append(json.loads(raw))
        who = {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}"}
        view = {"id": "Vmlldzox", "name": "nw-abc-v"}
        self.answer(
            {
                "data": {
                    "viewer": {**who, "teams": {"edges": []}},
                    "upsertView": {"view": view, "inserted": True},
                }
            }
        )

    def answer(self, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.mark.slow
def test_with_a_server_the_workspace_is_saved_there(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces", reason="needs the extra wandb")
    Server.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    done = program(
        tmp_path, "report", "--wandb=me/p",
        WANDB_BASE_URL=f"http://127.0.0.1:{server.server_port}", WANDB_API_KEY="0" * 40,
    )  # fmt: skip
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    assert "The workspace is http" in done.stdout
    saved = next(a["variables"] for a in Server.asked if "upsertView" in a["query"])
    check_workspace(saved["entityName"], saved["projectName"], json.loads(saved["spec"]), False)
    assert not (tmp_path / "wandb_workspace.json").exists()


@pytest.mark.usefixtures("in_empty_folder")
def test_the_sweep_file_makes_commands_that_the_program_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep = yaml.safe_load((ROOT / "examples" / "wandb_sweep.yaml").read_text())
    chosen = {
        name: spec.get("value", spec.get("values", [spec.get("min")])[-1])
        for name, spec in sweep["parameters"].items()
    }
    # As the agent of W&B expands them.
    args = [f"--{name}={value}" for name, value in chosen.items()]
    command = [part for part in sweep["command"] if part != "${env}"]
    place = command.index("${args}")
    assert command[0] == "dg-lightning"
    with pytest.raises(SystemExit) as ended:
        main([*command[1:place], *args, *command[place + 1 :], "--print_config"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["gate_lr_factor"] == 100
    assert printed["trainer"]["callbacks"][-1]["init_args"]["budget"] == 0.4
    assert printed["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.0003


@pytest.mark.usefixtures("in_empty_folder")
def test_a_logger_whose_package_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dg_lightning.configs.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["fit", *OPTIONS, "--config", "logger/wandb"])
    assert ended.value.code == 2
    expected = "dg-lightning: error: logger/wandb needs W&B: pip install wandb wandb-workspaces.\n"
    assert capsys.readouterr().err == expected
