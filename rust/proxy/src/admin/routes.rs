//! What the admin listener answers, declared once: for `GET /admin/routes`, and for the page python/ADMIN.md.
use std::fmt::Write;

use serde_json::{Value, json};

use crate::control;

/// Method, path, what it does.
const ROUTES: [(&str, &str, &str); 11] = [
    ("GET", "/", "Status page: one HTML file that asks for nothing else."),
    (
        "GET",
        "/admin/ranks",
        "Live table: every rank with what it holds, what bounds it and why it is closed; the queue; the arena.",
    ),
    (
        "POST",
        "/admin/drain",
        "`{\"worker\": id or URL, \"rank\"?: 0, \"wait_s\"?: 60}`: no new requests for it; what runs goes on.",
    ),
    ("POST", "/admin/undrain", "The same body: back into choice."),
    ("GET", "/admin/findings", "What `r3router check` would say of the engines that are in choice."),
    ("GET", "/admin/settings", "What the router runs with; keys are `***`."),
    ("GET", "/admin/routes", "This list."),
    ("GET", "/metrics", "Metrics, as on the main port. Open."),
    ("GET", "/health", "200 while the process answers. Open."),
    ("GET", "/readiness", "200 once there is an engine of every role. Open."),
    ("GET, POST, PUT, DELETE", "/workers, /workers/{id}", "The worker API, as on the main port."),
];

/// The routes as JSON.
pub(super) fn list() -> Value {
    let own: Vec<Value> =
        ROUTES.iter().map(|(method, path, what)| json!({"method": method, "path": path, "what": what})).collect();
    json!({ "routes": own, "every_engine": control::BROADCAST })
}

/// The page, in Markdown.
pub fn page() -> String {
    let mut page = String::from(
        "# Admin listener\n\n\
         Made from `rust/proxy/src/admin/routes.rs` by `make docs`; a test fails when this page and the code differ.\n\n\
         It listens on `--admin-host` (127.0.0.1) and `--admin-port` (29001; 0 is none). Beyond loopback it needs `--admin-api-key`, sent as\n\
         `Authorization: Bearer KEY`. Without a key it answers requests whose `host` is an address or `localhost` only. Every request that\n\
         changes something must have `content-type: application/json`. When its port is taken, the router starts without it and says so.\n\n\
         | method | path | what it does |\n|---|---|---|\n",
    );
    for (method, path, what) in ROUTES {
        let _ = writeln!(page, "| {method} | `{path}` | {what} |");
    }
    let every = control::BROADCAST.map(|path| format!("`{path}`")).join(", ");
    let _ = write!(
        page,
        "\nThese go once to every engine, as on the main port: {every}. With `--no-control-on-main-port` they and the worker API are\n\
         answered here only.\n\n\
         ## The live table\n\n\
         `GET /admin/ranks`; numbers that are not known, or that nothing bounds, are `null`.\n\n\
         | field of a rank | meaning |\n|---|---|\n"
    );
    for (field, what) in super::ranks::FIELDS {
        let _ = writeln!(page, "| `{field}` | {what} |");
    }
    page
}
