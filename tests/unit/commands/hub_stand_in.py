"""The part of the Hub's HTTP API that an upload uses, on the loopback interface."""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """What it holds, what it was asked, and whom it lets in."""

    token: str = "hf_right"
    may_write: bool = True
    fails_at: str = ""  # answers 500 to a path with this in it
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    address: str = ""


def start(hub: Hub) -> ThreadingHTTPServer:
    """Serves `hub` from a thread until `shutdown()`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, status, tree=None, **headers):
            body = json.dumps({} if tree is None else tree).encode()
            self.send_response(status)
            for name, value in {
                "Content-Length": str(len(body)),
                "Content-Type": "application/json",
                **headers,
            }.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def serve(self):
            body, path = self.body(), self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            if hub.fails_at and hub.fails_at in path:
                self.answer(500, {"error": "the stand-in is out of order"})
            elif path.startswith("/lfs/"):
                hub.objects[path.removeprefix("/lfs/")] = body
                self.answer(200)
            elif path == "/api/validate-yaml":
                wrong = "bad: [" in json.loads(body)["content"]
                errors = [{"message": "the metadata is no YAML"}] if wrong else []
                self.answer(400 if wrong else 200, {"errors": errors, "warnings": []})
            elif self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, {"error": "Invalid username or password."})
            elif self.command == "POST" and not hub.may_write:
                self.answer(403, {"error": "Forbidden"})
            else:
                self.permitted(path, body)

        do_GET = do_POST = do_PUT = serve

        def permitted(self, path, body):
            if path == "/api/repos/create":
                tree = json.loads(body)
                name = f"{tree['organization']}/{tree['name']}"
                hub.repositories[name] = Repository(tree.get("visibility") == "private")
                self.answer(200, {"url": f"{hub.address}/{name}"})
                return
            name = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2]).removesuffix(".git")
            repository = hub.repositories.get(name)
            if repository is None:
                self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            elif "/preupload/" in path:
                files = json.loads(body)["files"]
                modes = {
                    one["path"]: "lfs" if one["path"].endswith(".safetensors") else "regular" for one in files
                }
                told = [
                    {"path": key, "uploadMode": mode, "shouldIgnore": False} for key, mode in modes.items()
                ]
                self.answer(200, {"files": told})
            elif path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**one, "actions": {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}}}
                    for one in json.loads(body)["objects"]
                ]
                self.answer(200, {"transfer": "basic", "objects": objects})
            elif "/commit/" in path:
                self.commit(repository, [json.loads(line) for line in body.splitlines()])
                url = f"{hub.address}/{name}/commit/{'1' * 40}"
                self.answer(200, {"commitUrl": url, "commitOid": "1" * 40, "pullRequestUrl": None})
            else:
                self.answer(200, {"id": name, "private": repository.private, "sha": "0" * 40, "siblings": []})

        def commit(self, repository, lines):
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    repository.commits.append(value["summary"])
                elif line["key"] == "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                else:
                    content = hub.objects[value["oid"]]
                    assert hashlib.sha256(content).hexdigest() == value["oid"]
                    repository.files[value["path"]] = content

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server
