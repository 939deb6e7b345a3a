//! `/rerank` and `/v1/rerank`: engines answer with a list of ranks, clients of the SGLang router get it as `results` of an object.
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde_json::{Value, json};

use crate::passthrough::member;

/// The route that engines have.
pub const ENGINE_PATH: &str = "/v1/rerank";

/// What a client asked for.
#[derive(Debug)]
pub struct Ranking {
    model: Value,
    id: Value,
    top: Option<usize>,
    documents: bool,
}

/// What the body of a ranking call asks for; `None` for other paths.
pub fn wanted(path: &str, body: &[u8]) -> Option<Ranking> {
    if !matches!(path, "/rerank" | ENGINE_PATH) {
        return None;
    }
    Some(Ranking {
        model: member(body, "model").filter(Value::is_string).unwrap_or_else(|| "unknown".into()),
        id: member(body, "rid").unwrap_or(Value::Null),
        top: member(body, "top_k").and_then(|k| k.as_u64()).and_then(|k| usize::try_from(k).ok()).filter(|k| *k > 0),
        documents: member(body, "return_documents").and_then(|d| d.as_bool()).unwrap_or(true),
    })
}

impl Ranking {
    /// An engine's list as the client gets it. Anything else that an engine answers stays as it is.
    pub fn wrap(&self, body: Bytes) -> Bytes {
        let Ok(Value::Array(mut ranks)) = serde_json::from_slice(&body) else { return body };
        ranks.truncate(self.top.unwrap_or(usize::MAX));
        if !self.documents {
            for rank in ranks.iter_mut().filter_map(Value::as_object_mut) {
                rank.remove("document");
            }
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let reply = json!({
            "results": ranks, "model": self.model, "usage": null, "object": "rerank", "id": self.id, "created": now,
        });
        reply.to_string().into()
    }
}

#[cfg(test)]
mod tests {
    use super::wanted;
    use serde_json::{Value, json};

    fn wrapped(asked: &Value, engine: &Value) -> Value {
        let ranking = wanted("/v1/rerank", asked.to_string().as_bytes()).unwrap();
        let mut reply: Value = serde_json::from_slice(&ranking.wrap(engine.to_string().into())).unwrap();
        if let Some(object) = reply.as_object_mut() {
            assert!(object.remove("created").is_none_or(|c| c.as_u64() > Some(1_600_000_000)));
        }
        reply
    }

    #[test]
    fn a_list_becomes_results_as_many_and_with_documents_as_asked() {
        let list = json!([{"score": 0.9, "document": "b", "index": 1}, {"score": 0.1, "document": "a", "index": 0}]);
        assert_eq!(
            wrapped(&json!({"query": "q", "rid": "r-1"}), &list),
            json!({"results": list, "model": "unknown", "usage": null, "object": "rerank", "id": "r-1"})
        );
        assert_eq!(
            wrapped(&json!({"query": "q", "model": "m", "top_k": 1, "return_documents": false}), &list),
            json!({"results": [{"score": 0.9, "index": 1}], "model": "m", "usage": null, "object": "rerank", "id": null})
        );
        let other = json!({"error": "busy"});
        assert_eq!(wrapped(&json!({}), &other), other);
        assert!(wanted("/v1/score", b"{}").is_none());
    }
}
