//! What a list of pods, or one event of a watch, changes.
use std::collections::BTreeMap;

use crate::pod::{Identity, Pod};
use crate::select::{Engine, Wanted};

/// One change of the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The process behind this URL is gone.
    Remove(Engine),
    /// A process that was not there before, though its URL may have been.
    Add(Engine),
}

#[derive(Clone, Debug)]
struct Known {
    engine: Engine,
    restarts: u64,
}

/// The pods that are engines now. A pod comes in once it is ready, and stays while it runs although it may not be ready: the probe of a busy
/// engine fails while its tokens flow, and the router has its own means to tell.
#[derive(Debug)]
pub struct Plan {
    wanted: Wanted,
    known: BTreeMap<Identity, Known>,
}

impl Plan {
    /// Nothing known yet.
    pub fn new(wanted: Wanted) -> Self {
        Self { wanted, known: BTreeMap::new() }
    }

    /// How many engines are known.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// A full list: what is not in it is gone. Removals come before additions.
    pub fn list(&mut self, pods: &[Pod]) -> Vec<Change> {
        let mut removed = Vec::new();
        let seen: BTreeMap<Identity, &Pod> = pods.iter().map(|p| (p.identity(), p)).collect();
        self.known.retain(|identity, known| {
            let stays = seen.contains_key(identity);
            if !stays {
                removed.push(Change::Remove(known.engine.clone()));
            }
            stays
        });
        let mut added = Vec::new();
        for pod in seen.values() {
            self.one(pod, &mut removed, &mut added);
        }
        removed.append(&mut added);
        removed
    }

    /// A pod was added or changed. Another pod of its name, which ended unseen, goes first.
    pub fn changed(&mut self, pod: &Pod) -> Vec<Change> {
        let (mut removed, mut added) = (Vec::new(), Vec::new());
        let identity = pod.identity();
        let same = |other: &Identity| other.namespace == identity.namespace && other.name == identity.name;
        let former: Vec<Identity> = self.known.keys().filter(|k| same(k) && k.uid != identity.uid).cloned().collect();
        for former in former {
            removed.extend(self.known.remove(&former).map(|k| Change::Remove(k.engine)));
        }
        self.one(pod, &mut removed, &mut added);
        // An address that another pod had: that pod is gone, whether it was told or not.
        for change in &added {
            let Change::Add(engine) = change else { continue };
            let taken: Vec<Identity> = self
                .known
                .iter()
                .filter(|(id, k)| k.engine.url == engine.url && **id != identity)
                .map(|(id, _)| id.clone())
                .collect();
            for taken in taken {
                removed.extend(self.known.remove(&taken).map(|k| Change::Remove(k.engine)));
            }
        }
        removed.append(&mut added);
        removed
    }

    /// A pod was deleted.
    pub fn deleted(&mut self, pod: &Pod) -> Vec<Change> {
        self.known.remove(&pod.identity()).map(|k| Change::Remove(k.engine)).into_iter().collect()
    }

    fn one(&mut self, pod: &Pod, removed: &mut Vec<Change>, added: &mut Vec<Change>) {
        let identity = pod.identity();
        let now = self.wanted.engine(pod);
        if let Some(known) = self.known.get(&identity) {
            if now.as_ref() == Some(&known.engine) && pod.restarts() == known.restarts {
                return;
            }
            removed.push(Change::Remove(known.engine.clone()));
            self.known.remove(&identity);
        }
        if let Some(engine) = now.filter(|_| pod.ready()) {
            self.known.insert(identity, Known { engine: engine.clone(), restarts: pod.restarts() });
            added.push(Change::Add(engine));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Change, Plan};
    use crate::pod::{Condition, Container, Metadata, Pod, Status};
    use crate::select::{Engine, Role, Selector, Wanted};

    fn plan() -> Plan {
        let one = |role, word: &str| (role, Selector::parse(&[word]).unwrap());
        let roles = vec![one(Role::Prefill, "app=p"), one(Role::Decode, "app=d")];
        Plan::new(Wanted { roles, port: 30000, bootstrap_annotation: "sglang.ai/bootstrap-port".to_owned() })
    }

    fn pod(name: &str, uid: &str, ip: &str) -> Pod {
        Pod {
            metadata: Metadata {
                name: name.to_owned(),
                namespace: "rl".to_owned(),
                uid: uid.to_owned(),
                labels: [("app".to_owned(), name[..1].to_owned())].into(),
                annotations: [("sglang.ai/bootstrap-port".to_owned(), "8998".to_owned())].into(),
                ..Metadata::default()
            },
            status: Status {
                phase: "Running".to_owned(),
                pod_ip: ip.to_owned(),
                conditions: vec![Condition { r#type: "Ready".to_owned(), status: "True".to_owned() }],
                container_statuses: vec![Container { restart_count: 0 }],
            },
        }
    }

    fn unready(mut pod: Pod) -> Pod {
        pod.status.conditions[0].status = "False".to_owned();
        pod
    }

    fn engine(ip: &str, role: Role) -> Engine {
        let bootstrap_port = (role == Role::Prefill).then_some(8998);
        Engine { url: format!("http://{ip}:30000"), role, bootstrap_port }
    }

    fn d(ip: &str) -> Engine {
        engine(ip, Role::Decode)
    }

    #[test]
    fn a_list_adds_what_is_ready_with_its_role_and_bootstrap_port() {
        let mut plan = plan();
        let other = pod("x-0", "9", "192.0.2.9");
        let changes = plan.list(&[
            pod("d-0", "1", "192.0.2.1"),
            pod("p-0", "2", "192.0.2.2"),
            unready(pod("d-1", "3", "192.0.2.3")),
            other,
        ]);
        assert_eq!(changes, [Change::Add(d("192.0.2.1")), Change::Add(engine("192.0.2.2", Role::Prefill))]);
        assert_eq!(plan.list(&[pod("d-0", "1", "192.0.2.1"), pod("p-0", "2", "192.0.2.2")]), []);
    }

    #[test]
    fn what_a_list_lacks_is_removed_before_anything_is_added() {
        let mut plan = plan();
        plan.list(&[pod("d-0", "1", "192.0.2.1")]);
        let changes = plan.list(&[pod("d-1", "2", "192.0.2.1"), pod("d-2", "3", "192.0.2.3")]);
        assert_eq!(changes, [Change::Remove(d("192.0.2.1")), Change::Add(d("192.0.2.1")), Change::Add(d("192.0.2.3"))]);
    }

    #[test]
    fn the_same_name_at_another_address_leaves_the_old_address_first() {
        for by_list in [true, false] {
            let mut plan = plan();
            plan.list(&[pod("d-0", "1", "192.0.2.10")]);
            let new = pod("d-0", "2", "192.0.2.44");
            let changes = if by_list { plan.list(&[new]) } else { plan.changed(&new) };
            assert_eq!(changes, [Change::Remove(d("192.0.2.10")), Change::Add(d("192.0.2.44"))]);
        }
    }

    #[test]
    fn another_uid_or_a_restart_behind_the_same_address_is_a_new_generation() {
        let mut plan = plan();
        plan.list(&[pod("d-0", "1", "192.0.2.1")]);
        let both = [Change::Remove(d("192.0.2.1")), Change::Add(d("192.0.2.1"))];
        assert_eq!(plan.changed(&pod("d-0", "2", "192.0.2.1")), both);
        let mut restarted = pod("d-0", "2", "192.0.2.1");
        restarted.status.container_statuses[0].restart_count = 1;
        // It loads its weights first.
        assert_eq!(plan.changed(&unready(restarted.clone())), [Change::Remove(d("192.0.2.1"))]);
        assert_eq!(plan.changed(&restarted), [Change::Add(d("192.0.2.1"))]);
        restarted.status.container_statuses[0].restart_count = 2;
        assert_eq!(plan.changed(&restarted), both);
    }

    #[test]
    fn an_engine_that_was_ready_stays_while_it_runs_although_its_probe_fails() {
        let mut plan = plan();
        plan.list(&[pod("d-0", "1", "192.0.2.1")]);
        assert_eq!(plan.changed(&unready(pod("d-0", "1", "192.0.2.1"))), []);
        assert_eq!(plan.list(&[unready(pod("d-0", "1", "192.0.2.1"))]), []);
        let mut ending = pod("d-0", "1", "192.0.2.1");
        ending.metadata.deletion_timestamp = Some("2026-01-01T00:00:00Z".to_owned());
        assert_eq!(plan.changed(&ending), [Change::Remove(d("192.0.2.1"))]);
        assert_eq!(plan.deleted(&ending), []);
    }

    #[test]
    fn a_pod_that_takes_over_an_address_puts_the_former_one_out() {
        let mut plan = plan();
        plan.list(&[pod("d-0", "1", "192.0.2.1")]);
        assert_eq!(
            plan.changed(&pod("d-7", "8", "192.0.2.1")),
            [Change::Remove(d("192.0.2.1")), Change::Add(d("192.0.2.1"))]
        );
        assert_eq!(plan.len(), 1);
    }

    #[test]
    fn a_late_deletion_of_a_former_pod_does_not_take_the_new_one() {
        let mut plan = plan();
        plan.list(&[pod("d-0", "1", "192.0.2.1")]);
        plan.changed(&pod("d-0", "2", "192.0.2.1"));
        assert_eq!(plan.deleted(&pod("d-0", "1", "192.0.2.1")), []);
        assert_eq!(plan.len(), 1);
    }

    #[test]
    fn of_a_group_of_nodes_only_the_leader_is_an_engine() {
        let mut plan = plan();
        let mut leader = pod("d-0", "1", "192.0.2.1");
        let mut worker = pod("d-0-1", "2", "192.0.2.2");
        leader.metadata.labels.insert("leaderworkerset.sigs.k8s.io/worker-index".to_owned(), "0".to_owned());
        worker.metadata.labels.insert("leaderworkerset.sigs.k8s.io/worker-index".to_owned(), "1".to_owned());
        assert_eq!(plan.list(&[leader, worker]), [Change::Add(d("192.0.2.1"))]);
    }

    #[test]
    fn selectors_are_read_as_words_and_none_takes_nothing() {
        let selector = Selector::parse(&["app=d tier=x", "zone=a,y=z"]).unwrap();
        assert_eq!(selector.query(), "app=d,tier=x,zone=a,y=z");
        assert!(!Selector::parse::<&str>(&[]).unwrap().takes(&pod("d-0", "1", "192.0.2.1")));
        assert_eq!(Selector::parse(&["app"]), Err("`app` is not KEY=VALUE".to_owned()));
        assert_eq!(Selector::parse(&["a=b=c"]), Err("`a=b=c` is not KEY=VALUE".to_owned()));
    }
}
