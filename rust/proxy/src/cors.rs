//! Cross-origin calls: which web pages may use the router from a browser. Without `--cors-allowed-origins` all may, as with the SGLang
//! router; a request without `Origin` is no matter of this file.
use http::{HeaderMap, HeaderValue, Method, header};

use crate::errors::{Reply, bytes_reply};

/// See the module's text.
#[derive(Debug, Default)]
pub struct Cors {
    /// Empty: every origin.
    allowed: Vec<HeaderValue>,
}

impl Cors {
    /// `*` or nothing allows every origin.
    pub fn new(origins: &[String]) -> Self {
        if origins.iter().any(|o| o == "*") {
            return Self::default();
        }
        Self { allowed: origins.iter().filter_map(|o| HeaderValue::from_str(o.trim_end_matches('/')).ok()).collect() }
    }

    /// What a reply to `origin` says, when that one may call.
    fn allows(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        if self.allowed.is_empty() {
            return Some(HeaderValue::from_static("*"));
        }
        self.allowed.iter().find(|o| *o == origin).cloned()
    }

    /// The answer to a browser that asks before it calls (`OPTIONS` with `Access-Control-Request-Method`).
    pub fn preflight(&self, method: &Method, headers: &HeaderMap) -> Option<Reply> {
        let wanted = headers.get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
        let origin = headers.get(header::ORIGIN).filter(|_| method == Method::OPTIONS)?;
        let mut reply = bytes_reply(200, "text/plain; charset=utf-8", bytes::Bytes::new());
        if self.allows(origin).is_some() {
            let out = reply.headers_mut();
            out.insert(header::ACCESS_CONTROL_ALLOW_METHODS, wanted.clone());
            if let Some(names) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
                out.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
            }
            out.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("3600"));
        }
        Some(reply)
    }

    /// Marks a reply for the page of `origin`.
    pub fn mark(&self, origin: &HeaderValue, reply: &mut Reply) {
        let headers = reply.headers_mut();
        if let Some(allowed) = self.allows(origin) {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
        }
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
}

#[cfg(test)]
mod tests {
    use super::Cors;
    use crate::errors::bytes_reply;
    use http::{HeaderMap, HeaderValue, Method};

    fn marked(cors: &Cors, origin: &'static str) -> Option<String> {
        let mut reply = bytes_reply(200, "text/plain", bytes::Bytes::new());
        cors.mark(&HeaderValue::from_static(origin), &mut reply);
        assert_eq!(reply.headers()["vary"], "origin");
        reply.headers().get("access-control-allow-origin").map(|v| v.to_str().unwrap().to_owned())
    }

    #[test]
    fn named_origins_may_call_and_others_may_not_and_without_names_all_may() {
        let named = Cors::new(&["https://a.example/".to_owned(), "http://b:3000".to_owned()]);
        assert_eq!(marked(&named, "https://a.example").as_deref(), Some("https://a.example"));
        assert_eq!(marked(&named, "http://b:3000").as_deref(), Some("http://b:3000"));
        assert_eq!(marked(&named, "http://c"), None);
        for all in [Cors::new(&[]), Cors::new(&["x".to_owned(), "*".to_owned()])] {
            assert_eq!(marked(&all, "http://c").as_deref(), Some("*"));
        }
    }

    #[test]
    fn a_preflight_is_answered_with_what_it_asked_for() {
        let cors = Cors::new(&["https://a.example".to_owned()]);
        let mut headers = HeaderMap::new();
        headers.insert("origin", HeaderValue::from_static("https://a.example"));
        assert!(cors.preflight(&Method::OPTIONS, &headers).is_none(), "OPTIONS alone asks for nothing");
        headers.insert("access-control-request-method", HeaderValue::from_static("POST"));
        headers.insert("access-control-request-headers", HeaderValue::from_static("content-type"));
        assert!(cors.preflight(&Method::POST, &headers).is_none());
        let reply = cors.preflight(&Method::OPTIONS, &headers).unwrap();
        assert_eq!(reply.status(), 200);
        assert_eq!(reply.headers()["access-control-allow-methods"], "POST");
        assert_eq!(reply.headers()["access-control-allow-headers"], "content-type");
        headers.insert("origin", HeaderValue::from_static("https://b.example"));
        let refused = cors.preflight(&Method::OPTIONS, &headers).unwrap();
        assert!(!refused.headers().contains_key("access-control-allow-methods"));
    }
}
