//! Discovery against an API server that deletes, forgets, breaks and keeps silent.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]
mod fake;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fake::{Fake, pod, until};
use r3router_discovery::api::{Access, ApiError, Scope};
use r3router_discovery::follow::follow;
use r3router_discovery::object::Object;
use r3router_discovery::plan::{Change, Identity};
use r3router_discovery::pod::Pod;
use r3router_discovery::select::{Engine, Role, Selector, Wanted};
use r3router_discovery::slice::EndpointSlice;

/// The interval of lists where a test waits for one.
const SOON: Duration = Duration::from_secs(2);
/// One that no test waits for: what is seen before is seen by the watch, or by the list after a break.
const NEVER: Duration = Duration::from_secs(3600);

fn wanted() -> Wanted {
    let one = |role, word: &str| (role, Selector::parse(&[word]).unwrap());
    let roles = vec![one(Role::Prefill, "app=prefill"), one(Role::Decode, "app=decode")];
    Wanted { roles, port: 30000, bootstrap_annotation: "sglang.ai/bootstrap-port".to_owned() }
}

fn access(fake: &Fake) -> Access {
    Access::new("127.0.0.1", fake.port, &fake.file("ca.crt"), &fake.file("token")).unwrap()
}

/// What a router does with changes, and what it must never be asked to do.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<(Vec<Change>, Vec<Engine>)>>);

impl Seen {
    fn follow(&self, fake: &Fake, interval: Duration) -> tokio::task::JoinHandle<()> {
        self.follow_as::<Pod>(fake, interval)
    }

    fn follow_as<T: Object + 'static>(&self, fake: &Fake, interval: Duration) -> tokio::task::JoinHandle<()> {
        let (seen, access) = (self.clone(), access(fake));
        tokio::spawn(follow::<T>(access, Some("rl".to_owned()), wanted(), interval, move |changes| {
            let mut seen = seen.0.lock().unwrap();
            for change in changes {
                match &change {
                    Change::Add(_, engine) => {
                        assert!(!seen.1.iter().any(|e| e.url == engine.url), "{} twice", engine.url);
                        seen.1.push(engine.clone());
                    }
                    Change::Remove(_, engine) => {
                        let at = seen.1.iter().position(|e| e == engine).unwrap();
                        seen.1.remove(at);
                    }
                    Change::Dead(_) => {}
                }
                seen.0.push(change);
            }
        }))
    }

    fn hosts(&self) -> Vec<String> {
        let mut hosts: Vec<String> = self
            .0
            .lock()
            .unwrap()
            .1
            .iter()
            .map(|e| e.url.replace("http://192.0.2.", "").replace(":30000", ""))
            .collect();
        hosts.sort();
        hosts
    }

    async fn are(&self, hosts: &[&str]) {
        until(&format!("{hosts:?}, but {:?}", self.hosts()), || self.hosts() == hosts).await;
    }

    fn changes(&self) -> Vec<Change> {
        self.0.lock().unwrap().0.clone()
    }
}

fn d(ip: &str) -> Engine {
    Engine { url: format!("http://{ip}:30000"), role: Role::Decode, bootstrap_port: None }
}

fn id(name: &str, uid: &str) -> Identity {
    Identity { namespace: "rl".to_owned(), name: name.to_owned(), uid: uid.to_owned() }
}

async fn settled(name: &str, interval: Duration) -> (Fake, Seen, tokio::task::JoinHandle<()>) {
    let fake = Fake::start(name).await;
    fake.fill([
        pod("decode-0", "1", "192.0.2.10"),
        pod("prefill-0", "2", "192.0.2.20"),
        pod("other-0", "3", "192.0.2.30"),
    ]);
    let seen = Seen::default();
    let task = seen.follow(&fake, interval);
    seen.are(&["10", "20"]).await;
    until("a watch", || fake.watches() == 1).await;
    (fake, seen, task)
}

#[tokio::test]
async fn engines_are_found_with_role_and_bootstrap_port_in_one_namespace() {
    let (fake, seen, task) = settled("found", NEVER).await;
    let prefill = Engine { url: "http://192.0.2.20:30000".to_owned(), role: Role::Prefill, bootstrap_port: Some(8998) };
    assert_eq!(
        seen.changes(),
        [Change::Add(id("decode-0", "1"), d("192.0.2.10")), Change::Add(id("prefill-0", "2"), prefill)]
    );
    assert!(fake.paths().iter().all(|p| p.starts_with("/api/v1/namespaces/rl/pods?")), "{:?}", fake.paths());
    task.abort();
}

#[tokio::test]
async fn a_deletion_that_only_the_watch_tells_takes_the_engine_out() {
    let (fake, seen, task) = settled("deleted", NEVER).await;
    fake.delete("decode-0", true);
    seen.are(&["20"]).await;
    assert_eq!(fake.lists(), 1);
    task.abort();
}

#[tokio::test]
async fn a_pod_that_went_while_the_watch_was_broken_is_found_missing_by_the_list_after_it() {
    let (fake, seen, task) = settled("broken", NEVER).await;
    fake.delete("decode-0", false);
    fake.cut();
    seen.are(&["20"]).await;
    assert_eq!(fake.lists(), 2);
    task.abort();
}

#[tokio::test]
async fn the_same_name_at_another_address_is_out_before_it_is_in() {
    let (fake, seen, task) = settled("moved", NEVER).await;
    fake.put(pod("decode-0", "9", "192.0.2.44"));
    seen.are(&["20", "44"]).await;
    let (old, new) = (id("decode-0", "1"), id("decode-0", "9"));
    let expected = [Change::Remove(old.clone(), d("192.0.2.10")), Change::Dead(old), Change::Add(new, d("192.0.2.44"))];
    assert_eq!(seen.changes()[2..], expected);
    task.abort();
}

#[tokio::test]
async fn a_watch_that_says_nothing_is_overruled_by_the_next_list() {
    let (fake, seen, task) = settled("silent", SOON).await;
    fake.silent();
    fake.delete("decode-0", true);
    fake.put(pod("decode-1", "7", "192.0.2.11"));
    seen.are(&["11", "20"]).await;
    assert_eq!(fake.lists(), 2);
    task.abort();
}

#[tokio::test]
async fn a_version_that_is_gone_is_answered_by_a_list() {
    let (fake, seen, task) = settled("gone", NEVER).await;
    fake.delete("decode-0", false);
    fake.forget();
    fake.cut();
    seen.are(&["20"]).await;
    // The list after the break was of no use to watch from; the one after it was.
    until("another watch", || fake.watches() == 2).await;
    assert_eq!(fake.lists(), 3);
    fake.put(pod("decode-2", "8", "192.0.2.12"));
    seen.are(&["12", "20"]).await;
    task.abort();
}

#[tokio::test]
async fn a_restart_behind_the_same_address_is_another_engine() {
    let (fake, seen, task) = settled("restarted", NEVER).await;
    let mut restarted = pod("decode-0", "1", "192.0.2.10");
    restarted["status"]["containerStatuses"][0]["restartCount"] = 1.into();
    fake.put(restarted);
    until("both changes", || seen.changes().len() == 4).await;
    let same = || (id("decode-0", "1"), d("192.0.2.10"));
    let expected = [Change::Remove(same().0, same().1), Change::Add(same().0, same().1)];
    assert_eq!(seen.changes()[2..], expected);
    task.abort();
}

#[tokio::test]
async fn engines_stay_while_the_api_server_refuses_and_are_right_again_after_it() {
    let (fake, seen, task) = settled("refused", NEVER).await;
    fake.refuse(Some(403));
    fake.delete("decode-0", false);
    fake.cut();
    let asked = fake.paths().len();
    until("it is asked again", || fake.paths().len() >= asked + 3).await;
    assert_eq!(seen.hosts(), ["10", "20"]);
    fake.refuse(None);
    seen.are(&["20"]).await;
    task.abort();
}

#[tokio::test]
async fn a_watch_that_breaks_at_once_does_not_load_the_api_server() {
    let (fake, _seen, task) = settled("storm", NEVER).await;
    let began = tokio::time::Instant::now();
    for _ in 0..20 {
        fake.cut();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let most = 2 + u64::try_from(began.elapsed().as_millis()).unwrap() / 200;
    assert!(fake.lists() <= most, "{} lists, at most {most}", fake.lists());
    task.abort();
}

#[tokio::test]
async fn five_thousand_pods_come_in_pages() {
    let fake = Fake::start("many").await;
    let name = |n: u32| (format!("decode-{n}"), format!("10.{}.{}.{}", n >> 16, (n >> 8) & 255, n & 255));
    fake.fill((0..5000).map(|n| {
        let (name, ip) = name(n);
        let mut pod = pod(&name, &n.to_string(), &ip);
        // What a real one carries besides.
        pod["metadata"]["managedFields"] = "x".repeat(16 << 10).into();
        pod
    }));
    let listed = access(&fake).list::<Pod>(&Scope::default()).await.unwrap();
    assert_eq!((listed.items.len(), fake.pages()), (5000, 10));
    assert_eq!(listed.version, "5001");
    let seen = Seen::default();
    let task = seen.follow(&fake, NEVER);
    until("all of them", || seen.changes().len() == 5000).await;
    fake.delete("decode-4999", true);
    until("one less", || seen.hosts().len() == 4999).await;
    task.abort();
}

#[tokio::test]
async fn a_server_of_another_authority_is_not_asked() {
    let (fake, other) = (Fake::start("one").await, Fake::start("another").await);
    let access = Access::new("127.0.0.1", fake.port, &other.file("ca.crt"), &fake.file("token")).unwrap();
    let Err(ApiError::Connection(at, why)) = access.list::<Pod>(&Scope::default()).await else {
        panic!("it was asked")
    };
    assert_eq!(at, format!("127.0.0.1:{}", fake.port));
    assert!(why.contains("certificate"), "{why}");
    assert_eq!(fake.paths().len(), 0);
}

#[tokio::test]
async fn the_token_is_read_anew_for_each_connection() {
    let fake = Fake::start("token").await;
    let access = access(&fake);
    std::fs::write(fake.file("token"), "old").unwrap();
    assert!(matches!(access.list::<Pod>(&Scope::default()).await, Err(ApiError::Refused(401, _))));
    std::fs::write(fake.file("token"), fake::TOKEN).unwrap();
    assert_eq!(access.list::<Pod>(&Scope::default()).await.unwrap().items.len(), 0);
}

#[tokio::test]
async fn endpoints_of_services_are_found_and_go_as_pods_do() {
    let fake = Fake::start("slices").await;
    let slice = |endpoints: serde_json::Value| {
        serde_json::json!({
            "metadata": {"name": "decode-x", "namespace": "rl", "uid": "s", "labels": {"app": "decode"}},
            "addressType": "IPv4", "ports": [{"name": "http", "port": 30000}], "endpoints": endpoints
        })
    };
    let endpoint = |n: u32| {
        let pod = format!("decode-{n}");
        let target = serde_json::json!({"kind": "Pod", "namespace": "rl", "name": pod, "uid": pod});
        serde_json::json!({"addresses": [format!("192.0.2.{n}")], "conditions": {"ready": true}, "targetRef": target})
    };
    fake.fill([slice(serde_json::json!([endpoint(10), endpoint(11)]))]);
    let seen = Seen::default();
    let task = seen.follow_as::<EndpointSlice>(&fake, NEVER);
    seen.are(&["10", "11"]).await;
    until("a watch", || fake.watches() == 1).await;
    let asked = "/apis/discovery.k8s.io/v1/namespaces/rl/endpointslices?";
    assert!(fake.paths().iter().all(|p| p.starts_with(asked)), "{:?}", fake.paths());
    fake.put(slice(serde_json::json!([endpoint(11)])));
    seen.are(&["11"]).await;
    assert!(seen.changes().contains(&Change::Dead(id("decode-10", "decode-10"))));
    task.abort();
}
