//! What is read of an `EndpointSlice`. It knows what a pod does not: engines that are no pods of this cluster, behind a Service without a
//! selector; and the port of each. It does not know restarts and annotations.
use std::collections::BTreeMap;

use serde::Deserialize;

use crate::object::{Metadata, Object};
use crate::plan::{Change, Identity, Plan, Sighting};
use crate::select::{Engine, Role, Wanted, url};

/// Port names that mean something here.
const HTTP: &str = "http";
const BOOTSTRAP: &str = "bootstrap";

/// A part of the endpoints of a Service. It has the labels of its Service, and the Service's name as `kubernetes.io/service-name`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointSlice {
    /// Names and labels.
    pub metadata: Metadata,
    /// What its ports are for.
    #[serde(deserialize_with = "or_empty")]
    pub ports: Vec<Port>,
    /// Who is behind the Service.
    #[serde(deserialize_with = "or_empty")]
    pub endpoints: Vec<Endpoint>,
}

/// One port, the same for all endpoints of a slice.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Port {
    /// As the Service names it.
    pub name: Option<String>,
    /// Number; none means all.
    pub port: Option<u16>,
}

/// One endpoint.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Endpoint {
    /// The first is as good as any: they are addresses of the same thing.
    pub addresses: Vec<String>,
    /// How it is.
    pub conditions: Conditions,
    /// Usually a pod.
    pub target_ref: Option<Target>,
}

/// `conditions`; what is not said of readiness means yes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Conditions {
    /// Ready, and not about to end.
    pub ready: Option<bool>,
    /// About to end.
    pub terminating: Option<bool>,
}

/// `targetRef`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Target {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Unique for ever.
    pub uid: String,
}

/// The API writes a list without elements as null.
fn or_empty<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl EndpointSlice {
    fn port(&self, name: &str) -> Option<u16> {
        self.ports.iter().find(|p| p.name.as_deref() == Some(name)).and_then(|p| p.port)
    }

    /// The port of engines: the one that is named `http`, the only one beside that of the bootstrap server, or the one of the settings.
    fn http(&self, wanted: &Wanted) -> u16 {
        let mut others = self.ports.iter().filter(|p| p.name.as_deref() != Some(BOOTSTRAP)).filter_map(|p| p.port);
        let only = match (others.next(), others.next()) {
            (Some(port), None) => Some(port),
            _ => None,
        };
        self.port(HTTP).or(only).unwrap_or(wanted.port)
    }

    /// What is seen of its endpoints.
    pub fn sightings(&self, wanted: &Wanted) -> Vec<Sighting> {
        let Some(role) = wanted.role(&self.metadata).filter(|_| self.metadata.deletion_timestamp.is_none()) else {
            return Vec::new();
        };
        let port = self.http(wanted);
        let bootstrap_port = self.port(BOOTSTRAP).filter(|_| role == Role::Prefill);
        let one = |endpoint: &Endpoint| {
            let address = endpoint.addresses.first()?;
            let url = url(address, port);
            let identity = match &endpoint.target_ref {
                Some(t) => Identity { namespace: t.namespace.clone(), name: t.name.clone(), uid: t.uid.clone() },
                None => Identity { namespace: self.metadata.namespace.clone(), name: url.clone(), uid: String::new() },
            };
            let ends = endpoint.conditions.terminating == Some(true);
            Some(Sighting {
                identity,
                engine: (!ends).then_some(Engine { url, role, bootstrap_port }),
                ready: endpoint.conditions.ready != Some(false),
                restarts: 0,
                ended: false,
            })
        };
        self.endpoints.iter().filter_map(one).collect()
    }
}

/// Endpoints move between slices, so one slice says nothing by itself: the union of all is what is there.
#[derive(Debug, Default)]
pub struct Slices(BTreeMap<(String, String), Vec<Sighting>>);

impl Slices {
    fn put(&mut self, slice: &EndpointSlice, wanted: &Wanted) {
        let m = &slice.metadata;
        self.0.insert((m.namespace.clone(), m.name.clone()), slice.sightings(wanted));
    }

    fn union(&self, plan: &mut Plan) -> Vec<Change> {
        plan.list(self.0.values().flatten().cloned())
    }
}

impl Object for EndpointSlice {
    const GROUP: &'static str = "/apis/discovery.k8s.io/v1";
    const PLURAL: &'static str = "endpointslices";
    type View = Slices;

    fn list(all: Vec<Self>, view: &mut Slices, plan: &mut Plan, wanted: &Wanted) -> Vec<Change> {
        view.0.clear();
        for slice in &all {
            view.put(slice, wanted);
        }
        view.union(plan)
    }

    fn changed(self, view: &mut Slices, plan: &mut Plan, wanted: &Wanted) -> Vec<Change> {
        view.put(&self, wanted);
        view.union(plan)
    }

    fn deleted(self, view: &mut Slices, plan: &mut Plan, _: &Wanted) -> Vec<Change> {
        view.0.remove(&(self.metadata.namespace, self.metadata.name));
        view.union(plan)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{EndpointSlice, Slices};
    use crate::object::Object;
    use crate::plan::{Change, Plan};
    use crate::select::{Role, Selector, Wanted};

    fn wanted() -> Wanted {
        let one = |role, name: &str| (role, Selector::parse(&[format!("kubernetes.io/service-name={name}")]).unwrap());
        let roles = vec![one(Role::Prefill, "p"), one(Role::Decode, "d")];
        Wanted { roles, port: 30000, bootstrap_annotation: String::new() }
    }

    fn slice(service: &str, name: &str, ports: &Value, endpoints: &Value) -> EndpointSlice {
        let metadata =
            json!({"name": name, "namespace": "rl", "uid": name, "labels": {"kubernetes.io/service-name": service}});
        serde_json::from_value(
            json!({"metadata": metadata, "addressType": "IPv4", "ports": ports, "endpoints": endpoints}),
        )
        .unwrap()
    }

    fn pod(ip: &str, uid: &str, conditions: &Value) -> Value {
        let target = json!({"kind": "Pod", "namespace": "rl", "name": uid, "uid": uid});
        json!({"addresses": [ip], "conditions": conditions, "targetRef": target})
    }

    fn words(changes: &[Change]) -> Vec<String> {
        changes
            .iter()
            .map(|c| match c {
                Change::Add(id, e) => format!("+{} {} {:?} {:?}", id.uid, e.url, e.role, e.bootstrap_port),
                Change::Remove(id, e) => format!("-{} {}", id.uid, e.url),
                Change::Dead(id) => format!("x{}", id.uid),
            })
            .collect()
    }

    #[test]
    fn the_port_is_the_one_named_http_or_the_only_one_or_that_of_the_settings() {
        let wanted = wanted();
        let of = |ports: Value| slice("d", "d-1", &ports, &json!([])).http(&wanted);
        assert_eq!(of(json!([{"name": "x", "port": 1}, {"name": "http", "port": 2}])), 2);
        assert_eq!(of(json!([{"name": "bootstrap", "port": 8998}, {"name": "", "port": 3}])), 3);
        assert_eq!(of(json!([{"name": "x", "port": 1}, {"name": "y", "port": 2}])), 30000);
        assert_eq!(of(Value::Null), 30000);
    }

    #[test]
    fn endpoints_are_engines_with_the_ports_of_their_slice_and_need_no_pod() {
        let (wanted, mut plan, mut view) = (wanted(), Plan::default(), Slices::default());
        let ports = json!([{"name": "http", "port": 30001}, {"name": "bootstrap", "port": 8999}]);
        let p = slice(
            "p",
            "p-1",
            &ports,
            &json!([pod("192.0.2.1", "a", &json!({})), pod("192.0.2.2", "b", &json!({"ready": false}))]),
        );
        let outside =
            slice("d", "d-1", &json!([{"port": 40000}]), &json!([{"addresses": ["198.51.100.7"]}, {"addresses": []}]));
        let other = slice("x", "x-1", &ports, &json!([pod("192.0.2.3", "c", &json!({}))]));
        let changes = EndpointSlice::list(vec![p, outside, other], &mut view, &mut plan, &wanted);
        assert_eq!(
            words(&changes),
            ["+a http://192.0.2.1:30001 Prefill Some(8999)", "+ http://198.51.100.7:40000 Decode None"]
        );
    }

    #[test]
    fn an_endpoint_that_moves_between_slices_stays_and_one_that_ends_may_finish() {
        let (wanted, mut plan, mut view) = (wanted(), Plan::default(), Slices::default());
        let ready = |uid: &str| pod("192.0.2.1", uid, &json!({"ready": true}));
        let one = |name: &str, endpoints: Value| slice("d", name, &json!([{"port": 1}]), &endpoints);
        EndpointSlice::list(vec![one("d-1", json!([ready("a")]))], &mut view, &mut plan, &wanted);
        let mut put = |s: EndpointSlice| words(&s.changed(&mut view, &mut plan, &wanted));
        assert_eq!(put(one("d-2", json!([ready("a")]))), [""; 0]);
        assert_eq!(put(one("d-1", Value::Null)), [""; 0]);
        let ends = pod("192.0.2.1", "a", &json!({"ready": false, "serving": true, "terminating": true}));
        assert_eq!(put(one("d-2", json!([ends]))), ["-a http://192.0.2.1:1"]);
        // Another pod at its address: it is dead.
        assert_eq!(put(one("d-2", json!([ready("b")]))), ["xa", "+b http://192.0.2.1:1 Decode None"]);
        let gone = one("d-2", json!([]));
        assert_eq!(words(&gone.deleted(&mut view, &mut plan, &wanted)), ["-b http://192.0.2.1:1", "xb"]);
    }
}
