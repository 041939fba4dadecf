//! Takes privileges from a running program, in all of its threads.
//!
//! [`restrict`] is called once, when the program has opened what needs privileges. Afterwards the process has:
//!
//! | Property (`/proc/PID/status`) | Value |
//! |---|---|
//! | `CapPrm`, `CapEff`, `CapBnd` | at most [`Restriction::keep`] |
//! | `CapInh`, `CapAmb` | empty |
//! | `Uid`, `Gid`, `Groups` | those of [`Restriction::user`], if there is one |
//! | `NoNewPrivs` | 1: no program that it executes gains a privilege |
//! | `Seccomp` | 2 with [`Restriction::filter`]: other system calls than those of [`allowed_calls`] fail with `EPERM` |
//!
//! Linux has these properties for each thread. Threads that exist already are restricted by a signal, and threads that
//! start later inherit from the thread that starts them.
//!
//! [`refused_calls`] names the system calls that were refused. They raise SIGSYS, whose handler notes the number and
//! returns the error to the caller. A supervisor of another kind (`SECCOMP_RET_USER_NOTIF`) would be a thread of this
//! process, which could let every call pass. A refused call in a thread that blocks SIGSYS ends the process. Starting
//! a process fails with `EPERM` and is not named, because the C library blocks all signals meanwhile.

mod calls;
mod names;
mod restrict;
mod signal;
mod user;

pub use calls::{RefusedCall, allowed_calls, refused_calls};
pub use restrict::{PrivilegeError, Restriction, given_up, restrict};
pub use rustix::thread::CapabilitySet;
pub use user::{User, groups};

/// Returns the names of capabilities as in capabilities(7), with commas between; "none" for an empty set.
pub fn capability_names(set: CapabilitySet) -> String {
    let names: Vec<String> = set.iter_names().map(|(name, _)| format!("CAP_{name}")).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_have_the_names_of_the_manual() {
        let set = CapabilitySet::NET_RAW | CapabilitySet::BPF;
        assert_eq!(capability_names(set), "CAP_NET_RAW, CAP_BPF");
        assert_eq!(capability_names(CapabilitySet::empty()), "none");
    }
}
