//! What a list of objects, or one event of a watch, changes.
use std::collections::{BTreeMap, HashMap};

use crate::select::Engine;

/// Names a pod, or an endpoint without one, for ever.
#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Uid: another pod of the same name is another pod.
    pub uid: String,
}

/// What was seen of one pod or endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// Whose.
    pub identity: Identity,
    /// The engine in it, while it runs and is not about to end.
    pub engine: Option<Engine>,
    /// Whether its probes pass.
    pub ready: bool,
    /// Starts of its containers after the first.
    pub restarts: u64,
    /// Whether nothing runs in it any more.
    pub ended: bool,
}

/// One change of the fleet. Everything that was added is removed, and at the end dead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The process behind this URL is to get no new request. It may go on with what it has.
    Remove(Identity, Engine),
    /// A process that was not there before, though its URL may have been.
    Add(Identity, Engine),
    /// What was removed before does not run any more, whatever its sockets say: those to a host that is lost say nothing for minutes.
    Dead(Identity),
}

#[derive(Clone, Debug)]
struct Known {
    engine: Engine,
    restarts: u64,
    /// Removed, and not yet known to be dead.
    out: bool,
}

/// The engines that are known now. One comes in once it is ready, and stays while it runs although it may not be ready: the probe of a busy
/// engine fails while its tokens flow, and the router has its own means to tell.
#[derive(Debug, Default)]
pub struct Plan {
    known: BTreeMap<Identity, Known>,
    /// Who is in behind a URL.
    by_url: HashMap<String, Identity>,
}

/// Removals come before additions.
#[derive(Default)]
struct Changes {
    removed: Vec<Change>,
    added: Vec<Change>,
}

impl Changes {
    fn done(mut self) -> Vec<Change> {
        self.removed.append(&mut self.added);
        self.removed
    }
}

impl Plan {
    /// How many engines are in.
    pub fn len(&self) -> usize {
        self.by_url.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.by_url.is_empty()
    }

    /// A full list: what is not in it is gone.
    pub fn list(&mut self, seen: impl IntoIterator<Item = Sighting>) -> Vec<Change> {
        let mut changes = Changes::default();
        let seen: BTreeMap<Identity, Sighting> = seen.into_iter().map(|s| (s.identity.clone(), s)).collect();
        let absent: Vec<Identity> = self.known.keys().filter(|id| !seen.contains_key(id)).cloned().collect();
        for identity in absent {
            self.forget(&identity, &mut changes);
        }
        for sighting in seen.into_values() {
            self.one(sighting, &mut changes);
        }
        changes.done()
    }

    /// One was added or changed. Another of its name, which ended unseen, goes first.
    pub fn changed(&mut self, sighting: Sighting) -> Vec<Change> {
        let mut changes = Changes::default();
        let identity = &sighting.identity;
        let first = Identity { uid: String::new(), ..identity.clone() };
        let same = |other: &Identity| other.namespace == identity.namespace && other.name == identity.name;
        let of_the_name = self.known.range(first..).map(|(id, _)| id).take_while(|id| same(id));
        let former: Vec<Identity> = of_the_name.filter(|id| id.uid != identity.uid).cloned().collect();
        for former in former {
            self.forget(&former, &mut changes);
        }
        self.one(sighting, &mut changes);
        changes.done()
    }

    /// One was deleted.
    pub fn deleted(&mut self, identity: &Identity) -> Vec<Change> {
        let mut changes = Changes::default();
        self.forget(identity, &mut changes);
        changes.done()
    }

    /// It does not run any more.
    fn forget(&mut self, identity: &Identity, changes: &mut Changes) {
        let Some(known) = self.known.remove(identity) else { return };
        if !known.out {
            self.out(identity, known.engine, changes);
        }
        changes.removed.push(Change::Dead(identity.clone()));
    }

    fn out(&mut self, identity: &Identity, engine: Engine, changes: &mut Changes) {
        self.by_url.remove(&engine.url);
        changes.removed.push(Change::Remove(identity.clone(), engine));
    }

    fn one(&mut self, sighting: Sighting, changes: &mut Changes) {
        let Sighting { identity, engine, ready, restarts, ended } = sighting;
        if ended {
            return self.forget(&identity, changes);
        }
        if let Some(known) = self.known.get_mut(&identity) {
            let same = engine.as_ref() == Some(&known.engine) && restarts == known.restarts;
            if same && !known.out {
                return;
            }
            let was_in = !std::mem::replace(&mut known.out, true);
            let before = known.engine.clone();
            if was_in {
                self.out(&identity, before, changes);
            }
        }
        let Some(engine) = engine.filter(|_| ready) else { return };
        // An address that another one had: that one is gone, whether it was told or not.
        if let Some(other) = self.by_url.get(&engine.url).cloned() {
            let new = changes.added.len();
            changes.added.retain(|c| !matches!(c, Change::Add(id, _) if *id == other));
            if changes.added.len() < new {
                self.known.remove(&other);
                self.by_url.remove(&engine.url);
            } else {
                self.forget(&other, changes);
            }
        }
        self.by_url.insert(engine.url.clone(), identity.clone());
        self.known.insert(identity.clone(), Known { engine: engine.clone(), restarts, out: false });
        changes.added.push(Change::Add(identity, engine));
    }
}

#[cfg(test)]
mod tests {
    use super::{Change, Identity};
    use crate::object::{Condition, Metadata};
    use crate::pod::{Container, Pod, Status};
    use crate::select::{Engine, Role, Selector, Wanted};

    /// A plan that is shown pods.
    struct Plan(super::Plan, Wanted);

    impl Plan {
        fn list(&mut self, pods: &[Pod]) -> Vec<Change> {
            self.0.list(pods.iter().map(|p| p.sighting(&self.1)))
        }

        fn changed(&mut self, pod: &Pod) -> Vec<Change> {
            self.0.changed(pod.sighting(&self.1))
        }

        fn deleted(&mut self, pod: &Pod) -> Vec<Change> {
            self.0.deleted(&pod.sighting(&self.1).identity)
        }

        fn len(&self) -> usize {
            self.0.len()
        }
    }

    fn plan() -> Plan {
        let one = |role, word: &str| (role, Selector::parse(&[word]).unwrap());
        let roles = vec![one(Role::Prefill, "app=p"), one(Role::Decode, "app=d")];
        let wanted = Wanted { roles, port: 30000, bootstrap_annotation: "sglang.ai/bootstrap-port".to_owned() };
        Plan(super::Plan::default(), wanted)
    }

    fn id(name: &str, uid: &str) -> Identity {
        Identity { namespace: "rl".to_owned(), name: name.to_owned(), uid: uid.to_owned() }
    }

    fn add(name: &str, uid: &str, engine: Engine) -> Change {
        Change::Add(id(name, uid), engine)
    }

    fn remove(name: &str, uid: &str, engine: Engine) -> Change {
        Change::Remove(id(name, uid), engine)
    }

    fn dead(name: &str, uid: &str) -> Change {
        Change::Dead(id(name, uid))
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
        let both = [add("d-0", "1", d("192.0.2.1")), add("p-0", "2", engine("192.0.2.2", Role::Prefill))];
        assert_eq!(changes, both);
        assert_eq!(plan.list(&[pod("d-0", "1", "192.0.2.1"), pod("p-0", "2", "192.0.2.2")]), []);
    }

    #[test]
    fn what_a_list_lacks_is_removed_and_dead_before_anything_is_added() {
        let mut plan = plan();
        plan.list(&[pod("d-0", "1", "192.0.2.1")]);
        let changes = plan.list(&[pod("d-1", "2", "192.0.2.1"), pod("d-2", "3", "192.0.2.3")]);
        let expected = [
            remove("d-0", "1", d("192.0.2.1")),
            dead("d-0", "1"),
            add("d-1", "2", d("192.0.2.1")),
            add("d-2", "3", d("192.0.2.3")),
        ];
        assert_eq!(changes, expected);
    }

    #[test]
    fn the_same_name_at_another_address_leaves_the_old_address_first() {
        for by_list in [true, false] {
            let mut plan = plan();
            plan.list(&[pod("d-0", "1", "192.0.2.10")]);
            let new = pod("d-0", "2", "192.0.2.44");
            let changes = if by_list { plan.list(&[new]) } else { plan.changed(&new) };
            let expected = [remove("d-0", "1", d("192.0.2.10")), dead("d-0", "1"), add("d-0", "2", d("192.0.2.44"))];
            assert_eq!(changes, expected);
        }
    }

    #[test]
    fn another_uid_or_a_restart_behind_the_same_address_is_a_new_generation() {
        let mut plan = plan();
        let at = || d("192.0.2.1");
        plan.list(&[pod("d-0", "1", "192.0.2.1")]);
        let expected = [remove("d-0", "1", at()), dead("d-0", "1"), add("d-0", "2", at())];
        assert_eq!(plan.changed(&pod("d-0", "2", "192.0.2.1")), expected);
        let mut restarted = pod("d-0", "2", "192.0.2.1");
        restarted.status.container_statuses[0].restart_count = 1;
        // It loads its weights first.
        assert_eq!(plan.changed(&unready(restarted.clone())), [remove("d-0", "2", at())]);
        assert_eq!(plan.changed(&unready(restarted.clone())), []);
        assert_eq!(plan.changed(&restarted), [add("d-0", "2", at())]);
        restarted.status.container_statuses[0].restart_count = 2;
        // Not dead: it may be the container beside the engine that was started again.
        assert_eq!(plan.changed(&restarted), [remove("d-0", "2", at()), add("d-0", "2", at())]);
    }

    #[test]
    fn an_engine_that_was_ready_stays_while_it_runs_although_its_probe_fails() {
        let mut plan = plan();
        plan.list(&[pod("d-0", "1", "192.0.2.1")]);
        assert_eq!(plan.changed(&unready(pod("d-0", "1", "192.0.2.1"))), []);
        assert_eq!(plan.list(&[unready(pod("d-0", "1", "192.0.2.1"))]), []);
        let mut ending = pod("d-0", "1", "192.0.2.1");
        ending.metadata.deletion_timestamp = Some("2026-01-01T00:00:00Z".to_owned());
        // It may finish what it has, until it is gone.
        assert_eq!(plan.changed(&ending), [remove("d-0", "1", d("192.0.2.1"))]);
        assert_eq!(plan.list(&[ending.clone()]), []);
        assert_eq!(plan.deleted(&ending), [dead("d-0", "1")]);
        assert_eq!(plan.deleted(&ending), []);
    }

    #[test]
    fn a_pod_that_has_ended_is_dead_although_it_is_still_listed() {
        let mut plan = plan();
        plan.list(&[pod("d-0", "1", "192.0.2.1")]);
        let mut failed = pod("d-0", "1", "192.0.2.1");
        failed.status.phase = "Failed".to_owned();
        assert_eq!(plan.changed(&failed), [remove("d-0", "1", d("192.0.2.1")), dead("d-0", "1")]);
        assert_eq!(plan.list(&[failed]), []);
    }

    #[test]
    fn a_pod_that_takes_over_an_address_puts_the_former_one_out() {
        let mut plan = plan();
        plan.list(&[pod("d-0", "1", "192.0.2.1")]);
        assert_eq!(
            plan.changed(&pod("d-7", "8", "192.0.2.1")),
            [remove("d-0", "1", d("192.0.2.1")), dead("d-0", "1"), add("d-7", "8", d("192.0.2.1"))]
        );
        assert_eq!(plan.len(), 1);
        // In one list the last of them is taken.
        let mut plan = self::plan();
        let changes = plan.list(&[pod("d-0", "1", "192.0.2.1"), pod("d-7", "8", "192.0.2.1")]);
        assert_eq!(changes, [add("d-7", "8", d("192.0.2.1"))]);
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
    fn a_pod_that_loses_its_labels_gets_no_more_requests_and_is_not_dead() {
        let mut plan = plan();
        plan.list(&[pod("d-0", "1", "192.0.2.1")]);
        let mut bare = pod("d-0", "1", "192.0.2.1");
        bare.metadata.labels.clear();
        assert_eq!(plan.changed(&bare), [remove("d-0", "1", d("192.0.2.1"))]);
        assert_eq!(plan.changed(&pod("d-0", "1", "192.0.2.1")), [add("d-0", "1", d("192.0.2.1"))]);
    }

    #[test]
    fn of_a_group_of_nodes_only_the_leader_is_an_engine() {
        let mut plan = plan();
        let mut leader = pod("d-0", "1", "192.0.2.1");
        let mut worker = pod("d-0-1", "2", "192.0.2.2");
        leader.metadata.labels.insert("leaderworkerset.sigs.k8s.io/worker-index".to_owned(), "0".to_owned());
        worker.metadata.labels.insert("leaderworkerset.sigs.k8s.io/worker-index".to_owned(), "1".to_owned());
        assert_eq!(plan.list(&[leader, worker]), [add("d-0", "1", d("192.0.2.1"))]);
    }

    #[test]
    fn selectors_are_read_as_words_and_none_takes_nothing() {
        let selector = Selector::parse(&["app=d tier=x", "zone=a,y=z"]).unwrap();
        assert_eq!(selector.query(), "app=d,tier=x,zone=a,y=z");
        assert!(!Selector::parse::<&str>(&[]).unwrap().takes(&pod("d-0", "1", "192.0.2.1").metadata));
        assert_eq!(Selector::parse(&["app"]), Err("`app` is not KEY=VALUE".to_owned()));
        assert_eq!(Selector::parse(&["a=b=c"]), Err("`a=b=c` is not KEY=VALUE".to_owned()));
    }
}
