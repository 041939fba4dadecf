//! Tests of the gateway, with worker threads and step by step.

mod bfd;
mod filters;
mod floods;
mod gre;
mod ip_payload;
mod kinds;
mod known_outer;
mod lab;
mod learned_remotes;
mod link;
mod model;
mod model_sequences;
mod mpls;
mod outer_fragments;
mod path_mtu;
mod reassembly;
mod reconfigure;
mod routing;
mod routing_fast;
mod segments;
mod srv6;
mod state;
mod stepped;
mod suppression;
mod threaded;
mod traces;
