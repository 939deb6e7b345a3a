//! Engines found in Kubernetes, as pods or as endpoints of Services.
//!
//! Two verbs are all that is needed: LIST and WATCH. They are spoken here over hyper and rustls, since a general
//! client brings the types of the whole API and four times as many crates as this workspace has; and because what a client hides, a watch
//! that is silent or broken, is what has to be bounded here.
//!
//! `pod` and `slice` are what is read of a pod and of an `EndpointSlice`, `select` which of them are engines, `plan` what a list changes,
//! `api` the two verbs, `follow` the loop.
pub mod api;
pub mod follow;
pub mod object;
pub mod plan;
pub mod pod;
pub mod select;
pub mod slice;
