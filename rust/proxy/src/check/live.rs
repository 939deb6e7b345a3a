//! Asks every engine that the settings name, as the router would, and looks at what it says. Nothing is generated.
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderValue;
use r3router_core::error::Error;
use r3router_core::topology::Role;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::{Finding, Seen, Severity, examine};
use crate::address::Address;
use crate::allow::Allow;
use crate::app::CONNECT;
use crate::auth::bearer;
use crate::probe::{NotFound, Question, probe};
use crate::settings::{Settings, WorkerUrl};
use crate::tls::ClientTls;
use crate::upstream::Pool;
use crate::workers::role_name;

/// Engines that are asked at once.
const AT_ONCE: usize = 64;
/// How much longer than the router would keep it an idle connection is watched: an engine that closes at the same moment is as bad.
const MARGIN: Duration = Duration::from_millis(500);
/// Longest watch.
const LONGEST: Duration = Duration::from_secs(30);
/// How long the answer before it may take.
const ANSWER: Duration = Duration::from_secs(5);

/// What `r3router check` takes beside the settings.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckOptions {
    /// Tokens of a typical prompt.
    pub prompt_tokens: Option<u64>,
    /// Do not watch idle connections, which takes as long as the router keeps one.
    pub quick: bool,
}

/// Every engine, and every finding, as JSON: `{"engines": […], "findings": […], "worst": "error" or null}`.
///
/// # Errors
/// A setting that cannot be used.
pub async fn check(settings: &Settings, options: CheckOptions) -> Result<Value, Error> {
    let engines = ask_all(settings, options).await?;
    let findings = examine(settings, &engines, options.prompt_tokens);
    let worst = findings.iter().map(|f| f.code.severity()).filter(|s| *s != Severity::Note).min();
    Ok(json!({
        "engines": engines.iter().map(engine_json).collect::<Vec<_>>(),
        "findings": numbered(&findings),
        "worst": worst.map(Severity::name),
    }))
}

/// Findings with their numbers, as JSON.
pub(super) fn numbered(findings: &[Finding]) -> Vec<Value> {
    let one = |(at, f): (usize, &Finding)| {
        json!({
            "number": at + 1,
            "severity": f.code.severity().name(),
            "code": f.code.name(),
            "workers": f.workers.iter().map(|w| &**w).collect::<Vec<_>>(),
            "what": f.what,
            "advice": f.advice,
        })
    };
    findings.iter().enumerate().map(one).collect()
}

fn engine_json(seen: &Seen) -> Value {
    let mut json = json!({ "url": &*seen.url, "role": role_name(seen.role), "answers": seen.found.is_ok() });
    let Some(object) = json.as_object_mut() else { return json };
    match &seen.found {
        Ok(found) => {
            object.insert("ranks".into(), found.ranks.into());
            object.insert("version".into(), found.traits.version.as_ref().map(|v| v.text.to_string()).into());
            object.insert("model".into(), found.traits.model.as_deref().map(str::to_owned).into());
            object.insert("rows_per_rank".into(), found.facts.max_running.into());
            object.insert("tokens_per_rank".into(), found.facts.max_total_tokens.into());
        }
        Err(why) => {
            object.insert("why".into(), why.why().into());
        }
    }
    json
}

/// What every engine is asked with.
struct How {
    settings: Settings,
    key: Option<HeaderValue>,
    tls: Arc<ClientTls>,
    allow: Arc<Allow>,
    quick: bool,
}

/// An engine as the settings name it.
struct Named {
    url: String,
    role: Role,
    bootstrap_port: Option<u16>,
}

fn named(settings: &Settings) -> Vec<Named> {
    let plain = |role| move |worker: &WorkerUrl| Named { url: worker.0.clone(), role, bootstrap_port: None };
    let prefill = settings.prefill.iter().map(|worker| Named {
        url: worker.url.0.clone(),
        role: Role::Prefill,
        bootstrap_port: worker.bootstrap_port,
    });
    let regular = settings.worker_urls.iter().map(plain(Role::Regular));
    regular.chain(prefill).chain(settings.decode.iter().map(plain(Role::Decode))).collect()
}

async fn ask_all(settings: &Settings, options: CheckOptions) -> Result<Vec<Seen>, Error> {
    let how = Arc::new(How {
        key: bearer(settings.worker_api_key.as_ref(), "--worker-api-key")?,
        tls: ClientTls::new(settings)?,
        allow: Arc::new(Allow::new(&settings.worker_allow)),
        quick: options.quick,
        settings: settings.clone(),
    });
    let mut waiting: Vec<(usize, Named)> = named(settings).into_iter().enumerate().collect();
    waiting.reverse();
    let (mut running, mut seen) = (JoinSet::new(), Vec::new());
    loop {
        while running.len() < AT_ONCE
            && let Some((at, named)) = waiting.pop()
        {
            let address = Address::parse(&named.url)?;
            let how = Arc::clone(&how);
            running.spawn(async move { (at, ask_one(&how, named, address).await) });
        }
        match running.join_next().await {
            Some(Ok(one)) => seen.push(one),
            // A task that panicked; the others still tell what they found.
            Some(Err(error)) => tracing::error!(%error, "an engine could not be asked"),
            None => break,
        }
    }
    seen.sort_by_key(|(at, _)| *at);
    Ok(seen.into_iter().map(|(_, seen)| seen).collect())
}

async fn ask_one(how: &How, named: Named, address: Address) -> Seen {
    let How { settings, key, tls, allow, quick } = how;
    let Named { url, role, bootstrap_port } = named;
    let pool = Pool::secured(address.clone(), Duration::ZERO, CONNECT, Some(Arc::clone(tls)), allow);
    let question = Question {
        pool: &pool,
        role,
        key: key.as_ref(),
        bootstrap_port,
        health: &settings.health_check_endpoint,
        health_limit: settings.health_check_timeout_secs,
        mamba_slots_per_request: settings.mamba_slots_per_request,
        waiting_timeout: None,
        scale: settings.time_scale,
    };
    let found = probe(&question).await.map(Arc::new);
    // Behind TLS an idle connection is not watched.
    let watch = !quick && !address.tls && !matches!(found, Err(NotFound::Dead(_)));
    let closed_after =
        if watch { closed_after(&address, allow, key.as_ref(), settings.upstream_idle_secs).await } else { None };
    Seen { url: url.into(), address, role, bootstrap_port, found, closed_after }
}

/// How long the engine keeps a connection after a reply, when it closes it before the router would.
async fn closed_after(address: &Address, allow: &Allow, key: Option<&HeaderValue>, ours: Duration) -> Option<Duration> {
    let dial = async {
        match address.literal {
            Some(literal) => TcpStream::connect(literal).await,
            None => {
                let found = tokio::net::lookup_host((&*address.host, address.port)).await?;
                TcpStream::connect(&*allow.pick(&address.host, found)?).await
            }
        }
    };
    let mut stream = tokio::time::timeout(CONNECT, dial).await.ok()?.ok()?;
    let key = key.and_then(|k| k.to_str().ok()).map(|k| format!("authorization: {k}\r\n")).unwrap_or_default();
    let host = address.authority.to_str().ok()?;
    let head = format!("GET /model_info HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\n{key}\r\n");
    stream.write_all(head.as_bytes()).await.ok()?;
    let watched = ours.min(LONGEST) + MARGIN;
    let mut tile = [0; 4096];
    let mut last: Option<Instant> = None;
    loop {
        let limit = if last.is_some() { watched } else { ANSWER };
        match tokio::time::timeout(limit, stream.read(&mut tile)).await {
            Ok(Ok(n)) if n > 0 => last = Some(Instant::now()),
            // It closed without an answer: that is told by other findings.
            Ok(_) => return last.map(|at| at.elapsed()),
            Err(_) => return None,
        }
    }
}
