//! The programs from the command line. Most of these tests need no privilege; those that do are skipped without it.

mod application;
mod attach;
mod capture;
mod control;
mod flow;
mod flow_match;
mod gateway_rules;
mod l2fwd;
mod manual;
mod metrics;
mod ndr;
mod perf;
mod pktgen;
mod privileges;
mod reconfigure;
mod reference;
mod refusals;
mod rules_live;
mod running;
mod selftest;
mod service;
mod show;
mod top;
mod trace;
mod tunnel_gateway;
mod wirepath;
