"""Asks for known vulnerabilities of the locked packages; does not fail if the database cannot be reached.

    python scripts/audit.py pip-audit --disable-pip --no-deps --requirement requirements.lock

The arguments are the command line of pip-audit. Exits with 1 if vulnerabilities were found.
"""

import json
import subprocess
import sys


def report(output: str, errors: str) -> tuple[str, int]:
    """What to print and the exit status, for what `pip-audit --format=json` printed."""
    try:
        packages = json.loads(output)["dependencies"]
    except (ValueError, KeyError):
        reason = (errors.strip() or "no reason given").splitlines()[-1]
        return f"not audited: the database of vulnerabilities cannot be reached ({reason})\n", 0
    skipped = [package for package in packages if "skip_reason" in package]
    if len(skipped) == len(packages):
        reason = skipped[0]["skip_reason"] if skipped else "no packages"
        return f"not audited: the database of vulnerabilities knows none of the packages ({reason})\n", 0
    lines = []
    for package in packages:
        for known in package.get("vulns", []):
            fixed = ", ".join(known["fix_versions"]) or "none yet"
            lines.append(f"{package['name']} {package['version']}: {known['id']}; fixed in: {fixed}\n")
    lines += [f"not audited: {package['name']}\n" for package in skipped]
    found = sum(len(package.get("vulns", [])) for package in packages)
    lines.append(f"{len(packages) - len(skipped)} packages audited, {found} known vulnerabilities\n")
    return "".join(lines), int(found > 0)


def main() -> int:
    """Runs the audit."""
    done = subprocess.run([*sys.argv[1:], "--format=json"], capture_output=True, text=True)
    text, status = report(done.stdout, done.stderr)
    sys.stdout.write(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
