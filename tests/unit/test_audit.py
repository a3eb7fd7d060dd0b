"""What `make audit` makes of pip-audit's answer, and of none."""

import json
import subprocess
import sys
from pathlib import Path

from scripts.audit import report

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "audit.py"
CLEAN = {"name": "a", "version": "1", "vulns": []}
VULNERABLE = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1", "3"]}]}


def test_vulnerabilities_are_listed_and_fail():
    text, status = report(json.dumps({"dependencies": [CLEAN, VULNERABLE]}), "")
    assert status == 1
    assert text == "b 2: PYSEC-1; fixed in: 2.1, 3\n2 packages audited, 1 known vulnerabilities\n"


def test_packages_that_the_database_does_not_know_are_named():
    skipped = {"name": "c", "skip_reason": "not found"}
    text, status = report(json.dumps({"dependencies": [CLEAN, skipped]}), "")
    assert status == 0 and text == "not audited: c\n1 packages audited, 0 known vulnerabilities\n"


def test_a_mirror_without_a_database_is_said_to_be_one():
    skipped = {"name": "c", "skip_reason": "c not found on PyPI"}
    text, status = report(json.dumps({"dependencies": [skipped, skipped]}), "")
    assert status == 0 and text.endswith("knows none of the packages (c not found on PyPI)\n")


def test_without_the_database_it_says_so_and_does_not_fail(tmp_path):
    tool = tmp_path / "pip-audit"
    tool.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('ConnectionError: no route to host')\n")
    tool.chmod(0o755)
    done = subprocess.run([sys.executable, str(SCRIPT), str(tool)], capture_output=True, text=True)
    assert done.returncode == 0
    assert "cannot be reached (ConnectionError: no route to host)" in done.stdout
