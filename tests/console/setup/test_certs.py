"""`baton certs`, as a person types it."""

import ssl
from pathlib import Path

from typer.testing import CliRunner

from baton.cluster.config import load_config
from baton.console.main import app
from baton.console.setup.certs import ensure
from baton.tls.authority import Authority

run = CliRunner().invoke


def test_certificates_are_made_shown_and_renewed(tmp_path: Path) -> None:
    folder = str(tmp_path / "certs")
    made = run(app, ["certs", "make", folder, "--host", "baton.example"])
    assert made.exit_code == 0, made.output
    assert "wrote router, worker, client, monitor, redis, ray" in made.output
    assert "baton serve --tls" in made.output
    assert "nothing to do" in run(app, ["certs", "make", folder]).output
    shown = run(app, ["certs", "show", folder])
    assert shown.exit_code == 0
    assert "baton.example" in shown.output
    before = (tmp_path / "certs" / "worker.crt").read_bytes()
    assert run(app, ["certs", "renew", folder, "--role", "worker"]).exit_code == 0
    assert (tmp_path / "certs" / "worker.crt").read_bytes() != before
    ssl.create_default_context(cafile=tmp_path / "certs" / "ca.crt")


def test_one_that_is_over_fails_the_showing(tmp_path: Path) -> None:
    Authority(tmp_path).issue("worker", ["worker.baton.internal"], days=-1)
    shown = run(app, ["certs", "show", str(tmp_path)])
    assert shown.exit_code == 1
    assert "over" in shown.output


def test_what_cannot_be_done_is_one_line(tmp_path: Path) -> None:
    for arguments, text in (
        (["renew", str(tmp_path)], "begin with `baton certs make`"),
        (["show", str(tmp_path)], "begin with `baton certs make`"),
        (["make", str(tmp_path), "--role", "king"], "choose roles of router"),
        (["make", str(tmp_path), "--days", "0"], "--days must be above 0"),
    ):
        done = run(app, ["certs", *arguments])
        assert done.exit_code == 1
        assert text in " ".join(done.output.split()), done.output


def test_serving_with_a_folder_makes_what_is_missing_but_never_touches_another_ca(tmp_path: Path) -> None:
    said: list[str] = []
    config = load_config(flags={"tls": {"dir": str(tmp_path / "new")}})
    ensure(config, lambda part, what: said.append(what))
    assert "made certificates" in said[0]
    ensure(config, lambda part, what: said.append(what))
    assert len(said) == 1
    own = tmp_path / "own"
    own.mkdir()
    (own / "ca.crt").write_text("a company's")
    ensure(load_config(flags={"tls": {"dir": str(own)}}), lambda part, what: said.append(what))
    assert [path.name for path in own.iterdir()] == ["ca.crt"]
