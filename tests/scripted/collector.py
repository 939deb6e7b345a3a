"""An OpenTelemetry collector: takes traces by OTLP over gRPC or HTTP, and keeps the spans for a test to look at."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as methods
from opentelemetry.proto.trace.v1 import trace_pb2

KINDS = {
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
}


@dataclass
class Span:
    """One span, in words."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    flags: int
    began: int
    ended: int
    attributes: dict[str, Any]
    events: list[str]
    error: str | None
    """Its status, when that is an error."""
    resource: dict[str, Any]
    remote: bool


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as a dict."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@dataclass
class Collector:
    """See the module. `grpc_port` and `http_port` are its two ways in."""

    spans: list[Span] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, it takes what comes and does not answer."""
    asked: int = 0
    refuses: bool = False
    grpc_port: int = 0
    http_port: int = 0

    async def start(self, credentials: Any = None, port: int = 0) -> Collector:
        """Listens, with TLS when there are credentials; for gRPC on a port of the test's choice when there is one."""
        self.open.set()
        self._server = grpc.aio.server()
        methods.add_TraceServiceServicer_to_server(self, self._server)
        at = f"localhost:{port}"
        self.grpc_port = self._server.add_secure_port(at, credentials) if credentials else self._server.add_insecure_port(at)
        await self._server.start()
        app = web.Application()
        app.router.add_post("/{path:.*}", self._posted)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.http_port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """Ends at once."""
        self.open.set()
        await self._server.stop(None)
        await self._runner.cleanup()

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The one method of the gRPC service."""
        self.headers.append({str(k): str(v) for k, v in context.invocation_metadata()})
        self.asked += 1
        await self.open.wait()
        if self.refuses:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not from you")
        self._keep(request)
        return service.ExportTraceServiceResponse()

    async def _posted(self, request: web.Request) -> web.Response:
        self.headers.append({**request.headers, "path": request.path})
        raw = await request.read()
        self.asked += 1
        await self.open.wait()
        if self.refuses:
            return web.Response(status=403)
        self._keep(service.ExportTraceServiceRequest.FromString(raw))
        answer = service.ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")

    def _keep(self, request: Any) -> None:
        size = 0
        for group in request.resource_spans:
            resource = values(group.resource.attributes)
            for scope in group.scope_spans:
                for span in scope.spans:
                    size += 1
                    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
                    self.spans.append(
                        Span(
                            span.name,
                            KINDS[span.kind],
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.flags & 0xFF,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            values(span.attributes),
                            [e.name for e in span.events],
                            span.status.message if failed else None,
                            resource,
                            bool(span.flags & 0x200),
                        )
                    )
        self.batches.append(size)

    def named(self, name: str) -> list[Span]:
        """Spans of a name, in order of their beginning."""
        return sorted((s for s in self.spans if s.name == name), key=lambda s: s.began)

    def below(self, parent: Span) -> list[str]:
        """Names of the spans directly below one, sorted."""
        return sorted(s.name for s in self.spans if s.parent == parent.id)

    def of_request(self, path: str = "/generate") -> Span:
        """The only server span."""
        (span,) = self.named(f"POST {path}")
        return span
