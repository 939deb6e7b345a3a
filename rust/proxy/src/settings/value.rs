//! How each type of setting is read from a word, a TOML value or a JSON value, and shown again.
use std::time::Duration;

use r3router_core::admission::WindowMode;
use serde_json::{Value as Json, json};

use super::declare::{Arity, Unit};
use super::names::{
    AllowedHost, Assignment, Cap, DiscoverySource, LogLevel, Policy, PrefillWorker, R3Transport, Secret, WorkerUrl,
};
use super::nearest::nearest;
use super::quantity::{parse_bytes, parse_duration, show_bytes, show_duration};
use crate::address::Address;

/// A type of setting. Flags and variables arrive as JSON strings (or lists of them), TOML values as JSON of their own type.
pub(super) trait Value: Sized {
    const ARITY: Arity = Arity::One;
    const METAVAR: &'static str;
    const EXPECTS: &'static str;
    const CHOICES: &'static [&'static str] = &[];
    /// Whether an empty text is an error, where it means "none" otherwise.
    const NEVER_EMPTY: bool = false;

    /// Reads one value; the error is a sentence that quotes it.
    fn read(raw: &Json, unit: Unit) -> Result<Self, String>;

    /// The JSON form that [`Value::read`] reads back.
    fn show(&self) -> Json;

    /// The number that a row's range bounds, in `unit`.
    fn magnitude(&self, _unit: Unit) -> Option<f64> {
        None
    }
}

/// A scalar as one word; lists and tables are refused.
fn word(raw: &Json) -> Result<String, String> {
    match raw {
        Json::String(s) => Ok(s.trim().to_owned()),
        Json::Number(n) => Ok(n.to_string()),
        Json::Bool(b) => Ok(b.to_string()),
        other => Err(format!("`{other}` is not a single value")),
    }
}

/// Lists: a JSON list, or one text separated by commas or spaces (environment variables).
fn words(raw: &Json) -> Result<Vec<String>, String> {
    match raw {
        Json::Array(items) => {
            let mut all = Vec::new();
            for item in items {
                match item {
                    Json::Array(_) => all.extend(words(item)?),
                    _ => all.push(word(item)?),
                }
            }
            Ok(all)
        }
        _ => Ok(word(raw)?.split([',', ' ', '\n']).filter(|s| !s.is_empty()).map(str::to_owned).collect()),
    }
}

/// A worker's base URL in its one spelling.
fn worker(text: &str) -> Result<WorkerUrl, String> {
    let advised =
        |e: r3router_core::error::Error| e.advice.map_or(e.message.to_string(), |a| format!("{}; {a}", e.message));
    Address::parse(text).map(|a| WorkerUrl(a.url.to_string())).map_err(advised)
}

fn is_none(text: &str) -> bool {
    text.is_empty() || text.eq_ignore_ascii_case("none")
}

impl Value for String {
    const METAVAR: &'static str = "TEXT";
    const EXPECTS: &'static str = "a text";
    fn read(raw: &Json, _: Unit) -> Result<Self, String> {
        let text = word(raw)?;
        if text.is_empty() { Err("the value is empty".to_owned()) } else { Ok(text) }
    }
    fn show(&self) -> Json {
        json!(self)
    }
}

impl Value for bool {
    const ARITY: Arity = Arity::Switch;
    const METAVAR: &'static str = "";
    const EXPECTS: &'static str = "true or false";
    fn read(raw: &Json, _: Unit) -> Result<Self, String> {
        match word(raw)?.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Ok(true),
            "false" | "0" | "no" | "off" => Ok(false),
            other => Err(format!("`{other}` is neither true nor false")),
        }
    }
    fn show(&self) -> Json {
        json!(self)
    }
}

macro_rules! whole_number {
    ($($ty:ty),+) => {$(
        impl Value for $ty {
            const METAVAR: &'static str = "N";
            const EXPECTS: &'static str = "a whole number";
            fn read(raw: &Json, unit: Unit) -> Result<Self, String> {
                let text = word(raw)?;
                if unit == Unit::Bytes {
                    return Self::try_from(parse_bytes(&text)?).map_err(|_| format!("`{text}` is too large"));
                }
                text.replace('_', "").parse().map_err(|_| format!("`{text}` is not a whole number from 0 to {}", Self::MAX))
            }
            fn show(&self) -> Json {
                json!(self)
            }
            #[allow(clippy::cast_lossless, reason = "one body for every width")]
            fn magnitude(&self, _: Unit) -> Option<f64> {
                Some(*self as f64)
            }
        }
    )+};
}
whole_number!(u32, usize);

impl Value for u16 {
    const METAVAR: &'static str = "PORT";
    const EXPECTS: &'static str = "a port";
    fn read(raw: &Json, _: Unit) -> Result<Self, String> {
        let text = word(raw)?;
        text.parse().map_err(|_| format!("`{text}` is not a port from 0 to 65535"))
    }
    fn show(&self) -> Json {
        json!(self)
    }
    fn magnitude(&self, _: Unit) -> Option<f64> {
        Some(f64::from(*self))
    }
}

/// 64-bit settings are sizes in bytes.
impl Value for u64 {
    const METAVAR: &'static str = "SIZE";
    const EXPECTS: &'static str = "a size in bytes, such as 536870912, 512MiB or 8GiB";
    fn read(raw: &Json, _: Unit) -> Result<Self, String> {
        parse_bytes(&word(raw)?)
    }
    fn show(&self) -> Json {
        json!(show_bytes(*self))
    }
    fn magnitude(&self, _: Unit) -> Option<f64> {
        Some(*self as f64)
    }
}

impl Value for f64 {
    const METAVAR: &'static str = "X";
    const EXPECTS: &'static str = "a number";
    fn read(raw: &Json, _: Unit) -> Result<Self, String> {
        let text = word(raw)?;
        text.parse().ok().filter(|x: &f64| x.is_finite()).ok_or_else(|| format!("`{text}` is not a number"))
    }
    fn show(&self) -> Json {
        json!(self)
    }
    fn magnitude(&self, _: Unit) -> Option<f64> {
        Some(*self)
    }
}

impl Value for Duration {
    const METAVAR: &'static str = "DURATION";
    const EXPECTS: &'static str = "a duration, such as 300, 300s, 250ms or 1h30m";
    fn read(raw: &Json, unit: Unit) -> Result<Self, String> {
        parse_duration(&word(raw)?, unit)
    }
    fn show(&self) -> Json {
        json!(show_duration(*self))
    }
    fn magnitude(&self, unit: Unit) -> Option<f64> {
        Some(self.as_secs_f64() * if unit == Unit::Millis { 1e3 } else { 1.0 })
    }
}

impl<T: Value> Value for Option<T> {
    const METAVAR: &'static str = T::METAVAR;
    const EXPECTS: &'static str = T::EXPECTS;
    const CHOICES: &'static [&'static str] = T::CHOICES;
    fn read(raw: &Json, unit: Unit) -> Result<Self, String> {
        match raw {
            Json::Null => Ok(None),
            Json::String(s) if s.is_empty() && T::NEVER_EMPTY => {
                Err("it is empty; leave it out, or give it".to_owned())
            }
            Json::String(s) if is_none(s) => Ok(None),
            _ => T::read(raw, unit).map(Some),
        }
    }
    fn show(&self) -> Json {
        self.as_ref().map_or(Json::Null, T::show)
    }
    fn magnitude(&self, unit: Unit) -> Option<f64> {
        self.as_ref().and_then(|v| v.magnitude(unit))
    }
}

impl Value for Cap {
    const METAVAR: &'static str = "N";
    const EXPECTS: &'static str = "a whole number, or -1 for no limit";
    fn read(raw: &Json, unit: Unit) -> Result<Self, String> {
        let text = word(raw)?;
        if text == "-1" || is_none(&text) { Ok(Self(None)) } else { u32::read(raw, unit).map(|n| Self(Some(n))) }
    }
    fn show(&self) -> Json {
        self.0.map_or(json!(-1), |n| json!(n))
    }
    fn magnitude(&self, _: Unit) -> Option<f64> {
        self.0.map(f64::from)
    }
}

impl Value for Secret {
    // A script whose secret is not set would open the router to anybody.
    const NEVER_EMPTY: bool = true;
    const METAVAR: &'static str = "KEY";
    const EXPECTS: &'static str = "a key";
    fn read(raw: &Json, unit: Unit) -> Result<Self, String> {
        let key = String::read(raw, unit)?;
        // The key itself is not quoted: errors end up in logs.
        if key.bytes().all(|b| (0x21..0x7f).contains(&b)) {
            Ok(Self::new(key))
        } else {
            Err("the key has characters that a header cannot carry".to_owned())
        }
    }
    fn show(&self) -> Json {
        json!("***")
    }
}

impl Value for Vec<AllowedHost> {
    const ARITY: Arity = Arity::Many;
    const METAVAR: &'static str = "HOST|NET...";
    const EXPECTS: &'static str = "a list of hosts, *.domains, addresses and networks";
    fn read(raw: &Json, _: Unit) -> Result<Self, String> {
        words(raw)?.iter().map(|text| AllowedHost::parse(text)).collect()
    }
    fn show(&self) -> Json {
        self.iter().map(|a| json!(a.to_string())).collect()
    }
}

macro_rules! named {
    ($($ty:ty),+) => {$(
        impl Value for $ty {
            const METAVAR: &'static str = "NAME";
            const EXPECTS: &'static str = "one of the names";
            const CHOICES: &'static [&'static str] = Self::NAMES;
            fn read(raw: &Json, _: Unit) -> Result<Self, String> {
                let text = word(raw)?;
                Self::from_name(&text.to_ascii_lowercase().replace('-', "_")).ok_or_else(|| {
                    let near = nearest(&text, Self::NAMES.iter().copied());
                    let hint = near.map(|n| format!(", did you mean `{n}`?")).unwrap_or_default();
                    format!("`{text}` is not one of {}{hint}", Self::NAMES.join(", "))
                })
            }
            fn show(&self) -> Json {
                json!(self.name())
            }
        }
    )+};
}
named!(DiscoverySource, Policy, Assignment, LogLevel, R3Transport);

impl Value for WindowMode {
    const METAVAR: &'static str = "MODE";
    const EXPECTS: &'static str = "computed, unbounded or a number of transfers";
    fn read(raw: &Json, _: Unit) -> Result<Self, String> {
        let text = word(raw)?;
        match (text.as_str(), text.parse::<u32>()) {
            ("computed", _) => Ok(Self::Computed),
            ("unbounded", _) => Ok(Self::Unbounded),
            (_, Ok(n)) if n > 0 => Ok(Self::Static(n)),
            _ => Err(format!("`{text}` is neither computed, unbounded nor a number above 0")),
        }
    }
    fn show(&self) -> Json {
        match self {
            Self::Computed => json!("computed"),
            Self::Unbounded => json!("unbounded"),
            Self::Static(n) => json!(n),
        }
    }
}

impl Value for Vec<String> {
    const ARITY: Arity = Arity::Many;
    const METAVAR: &'static str = "TEXT";
    const EXPECTS: &'static str = "a list of texts";
    fn read(raw: &Json, _: Unit) -> Result<Self, String> {
        words(raw)
    }
    fn show(&self) -> Json {
        json!(self)
    }
}

impl Value for Vec<f64> {
    const ARITY: Arity = Arity::Many;
    const METAVAR: &'static str = "X";
    const EXPECTS: &'static str = "a list of numbers";
    fn read(raw: &Json, unit: Unit) -> Result<Self, String> {
        words(raw)?.into_iter().map(|w| f64::read(&Json::String(w), unit)).collect()
    }
    fn show(&self) -> Json {
        json!(self)
    }
}

impl Value for Vec<WorkerUrl> {
    const ARITY: Arity = Arity::Many;
    const METAVAR: &'static str = "URL";
    const EXPECTS: &'static str = "a list of worker URLs";
    fn read(raw: &Json, _: Unit) -> Result<Self, String> {
        words(raw)?.iter().map(|w| worker(w)).collect()
    }
    fn show(&self) -> Json {
        self.iter().map(|w| json!(w.0)).collect()
    }
}

impl Value for Vec<PrefillWorker> {
    const ARITY: Arity = Arity::UrlPort;
    const METAVAR: &'static str = "URL [PORT]";
    const EXPECTS: &'static str = "worker URLs, each with its bootstrap port or none";
    fn read(raw: &Json, _: Unit) -> Result<Self, String> {
        match raw {
            Json::Array(items) => items.iter().map(prefill).collect(),
            _ => word(raw)?.split(',').filter(|s| !s.trim().is_empty()).map(|s| prefill(&json!(s))).collect(),
        }
    }
    fn show(&self) -> Json {
        let line = |w: &PrefillWorker| match w.bootstrap_port {
            Some(port) => json!(format!("{} {port}", w.url.0)),
            None => json!(w.url.0),
        };
        self.iter().map(line).collect()
    }
}

/// `["URL", "PORT"]`, `"URL PORT"` or `{url = …, bootstrap_port = …}`; the port may be missing or `none`.
fn prefill(raw: &Json) -> Result<PrefillWorker, String> {
    let parts = match raw {
        Json::Object(table) => {
            if let Some(key) = table.keys().find(|k| !matches!(k.as_str(), "url" | "bootstrap_port")) {
                return Err(format!("`{key}` is not a field of a prefill worker; it has url and bootstrap_port"));
            }
            let url = table.get("url").ok_or("a prefill worker needs the field url")?;
            let mut parts = vec![word(url)?];
            parts.extend(table.get("bootstrap_port").map(word).transpose()?);
            parts
        }
        Json::Array(items) => items.iter().map(word).collect::<Result<_, _>>()?,
        other => word(other)?.split_whitespace().map(str::to_owned).collect(),
    };
    let (url, port) = match parts.as_slice() {
        [url] => (url, None),
        [url, port] if is_none(port) => (url, None),
        [url, port] => (url, Some(port)),
        _ => return Err(format!("`{}` is not URL [PORT|none]", parts.join(" "))),
    };
    let bootstrap_port = port
        .map(|p| {
            p.parse::<u16>()
                .ok()
                .filter(|p| *p > 0)
                .ok_or_else(|| format!("the bootstrap port `{p}` is not a port from 1 to 65535"))
        })
        .transpose()?;
    Ok(PrefillWorker { url: worker(url)?, bootstrap_port })
}
