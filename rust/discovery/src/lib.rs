//! Engines found as pods of Kubernetes.
//!
//! Two verbs of one resource are all that is needed: LIST and WATCH of pods. They are spoken here over hyper and rustls, since a general
//! client brings the types of the whole API and four times as many crates as this workspace has; and because what a client hides, a watch
//! that is silent or broken, is what has to be bounded here.
//!
//! `pod` is what is read of a pod, `select` which pods are engines, `plan` what a list changes, `api` the two verbs, `follow` the loop.
pub mod api;
pub mod follow;
pub mod plan;
pub mod pod;
pub mod select;
