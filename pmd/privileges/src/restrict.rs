use std::collections::HashSet;
use std::fmt;
use std::io;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Gid, Pid, Uid, getegid, geteuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set, gettid,
    remove_capability_from_bounding_set, set_capabilities, set_keep_capabilities, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use crate::signal::{self, Order};
use crate::{User, calls};

/// Longest wait for a thread that gets the signal.
const THREAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two looks at such a thread.
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// Privileges that a process keeps.
#[derive(Clone, Debug)]
pub struct Restriction {
    /// Capabilities, if the process has them.
    pub keep: CapabilitySet,
    /// The user that the process becomes; `None`: it stays what it is.
    pub user: Option<User>,
    /// Refuse all system calls but those of [`crate::allowed_calls`].
    pub filter: bool,
}

/// Error of [`restrict`]. The process must not go on: some of its threads may be restricted already.
#[derive(Debug, thiserror::Error)]
pub enum PrivilegeError {
    /// The process was restricted before.
    #[error("the program has given up its privileges already")]
    Repeated,
    /// Only root may become another user.
    #[error("only root may become the user \"{0}\"")]
    NotRoot(String),
    /// A thread could not give up its privileges.
    #[error("thread {thread} cannot give up its privileges: {error}")]
    Thread {
        /// Name of the thread, or its number.
        thread: String,
        /// The operation that failed.
        error: ThreadError,
    },
    /// A thread does not handle the signal.
    #[error("thread {0} blocks SIGSYS and keeps its privileges")]
    Blocked(String),
    /// The list of the own threads cannot be read, or a thread cannot be signalled.
    #[error("cannot reach the threads of the program: {0}")]
    Threads(#[source] io::Error),
    /// The kernel does not take the filter.
    #[error("the kernel refuses the filter of system calls: {0}")]
    Filter(String),
}

/// An operation that failed in a thread.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("{what}: {errno}")]
pub struct ThreadError {
    what: &'static str,
    errno: Errno,
}

/// Steps for each thread. It has no heap memory of its own that a step would allocate, so a signal handler may run it.
pub(crate) struct Plan {
    keep: CapabilitySet,
    user: Option<(Uid, Gid, Vec<Gid>)>,
}

impl Plan {
    /// Restricts the calling thread. A thread that is restricted already stays as it is.
    pub(crate) fn apply_to_thread(&self) -> Result<(), ThreadError> {
        let failed = |what| move |errno| ThreadError { what, errno };
        let before = capabilities(None).map_err(failed("capget"))?;
        // Without CAP_SETPCAP the bounding set stays. It then has no effect, because of "no new privileges".
        if before.effective.contains(CapabilitySet::SETPCAP) {
            for capability in (0..64).map(|bit| CapabilitySet::from_bits_retain(1 << bit)) {
                // Numbers above the last capability of the kernel are invalid.
                let Ok(is_there) = capability_is_in_bounding_set(capability) else { break };
                if is_there && !self.keep.contains(capability) {
                    remove_capability_from_bounding_set(capability).map_err(failed("PR_CAPBSET_DROP"))?;
                }
            }
        }
        if let Some((uid, gid, groups)) = &self.user
            && (geteuid() != *uid || getegid() != *gid)
        {
            set_keep_capabilities(true).map_err(failed("PR_SET_KEEPCAPS"))?;
            set_thread_groups(groups).map_err(failed("setgroups"))?;
            set_thread_res_gid(*gid, *gid, *gid).map_err(failed("setresgid"))?;
            set_thread_res_uid(*uid, *uid, *uid).map_err(failed("setresuid"))?;
            set_keep_capabilities(false).map_err(failed("PR_SET_KEEPCAPS"))?;
        }
        let kept = before.permitted & self.keep;
        let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
        set_capabilities(None, sets).map_err(failed("capset"))?;
        clear_ambient_capability_set().map_err(failed("PR_CAP_AMBIENT"))?;
        set_no_new_privs(true).map_err(failed("PR_SET_NO_NEW_PRIVS"))
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan").field("keep", &self.keep).finish_non_exhaustive()
    }
}

/// Capabilities that the process gave up.
static GIVEN_UP: OnceLock<CapabilitySet> = OnceLock::new();

/// Returns the capabilities that the process had and gave up by [`restrict`]. Empty before.
pub fn given_up() -> CapabilitySet {
    GIVEN_UP.get().copied().unwrap_or(CapabilitySet::empty())
}

/// Restricts all threads of the process, once. Returns the capabilities that are left.
///
/// # Errors
/// If a thread cannot be restricted. The caller must then end the program.
pub fn restrict(restriction: Restriction) -> Result<CapabilitySet, PrivilegeError> {
    let Restriction { keep, user, filter } = restriction;
    let before = capabilities(None).map_err(|errno| PrivilegeError::Threads(errno.into()))?;
    let changes_user = user.as_ref().filter(|user| geteuid() != user.uid || getegid() != user.gid);
    if let Some(user) = changes_user
        && !before.effective.contains(CapabilitySet::SETUID | CapabilitySet::SETGID)
    {
        return Err(PrivilegeError::NotRoot(user.name.clone()));
    }
    let kept = before.permitted & keep;
    let plan = Plan { keep, user: user.map(|user| (user.uid, user.gid, user.groups)) };
    let order = Order::give(plan).ok_or(PrivilegeError::Repeated)?;
    signal::install().map_err(PrivilegeError::Threads)?;
    // The calling thread is first: if it cannot, nobody needs to try.
    order.plan().apply_to_thread().map_err(|error| PrivilegeError::Thread { thread: thread_name(gettid()), error })?;
    restrict_others(order)?;
    if filter {
        install_filter(kept)?;
    }
    let _ = GIVEN_UP.set(before.permitted - kept);
    Ok(kept)
}

/// Restricts the other threads. A thread that was not restricted may start others meanwhile, so the list is read until
/// it has no new ones.
fn restrict_others(order: &Order) -> Result<(), PrivilegeError> {
    let mut restricted = HashSet::from([gettid()]);
    loop {
        let new: Vec<Pid> =
            threads().map_err(PrivilegeError::Threads)?.into_iter().filter(|id| !restricted.contains(id)).collect();
        if new.is_empty() {
            return Ok(());
        }
        for thread in new {
            restricted.insert(thread);
            let done = order.done();
            if !signal::send(thread).map_err(PrivilegeError::Threads)? {
                continue;
            }
            let end = Instant::now() + THREAD_TIMEOUT;
            while order.done() == done && is_alive(thread) {
                if Instant::now() >= end {
                    return Err(PrivilegeError::Blocked(thread_name(thread)));
                }
                std::thread::sleep(LOOK_EVERY);
            }
            if let Some(error) = order.failed() {
                return Err(PrivilegeError::Thread { thread: thread_name(thread), error: *error });
            }
        }
    }
}

/// Returns the threads of this process.
fn threads() -> io::Result<Vec<Pid>> {
    let names = std::fs::read_dir("/proc/self/task")?.map(|entry| Ok(entry?.file_name()));
    let numbers = names.map(|name: io::Result<_>| Ok(name?.to_str().and_then(|name| name.parse().ok())));
    Ok(numbers.collect::<io::Result<Vec<Option<i32>>>>()?.into_iter().flatten().filter_map(Pid::from_raw).collect())
}

/// Returns false if a thread has ended, or is about to.
fn is_alive(thread: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/self/task/{}/status", thread.as_raw_nonzero()));
    status.is_ok_and(|status| {
        !status
            .lines()
            .any(|line| line.strip_prefix("State:").is_some_and(|state| state.trim().starts_with(['Z', 'X'])))
    })
}

fn thread_name(thread: Pid) -> String {
    let number = thread.as_raw_nonzero();
    let name = std::fs::read_to_string(format!("/proc/self/task/{number}/comm"));
    name.map_or_else(|_| number.to_string(), |name| name.trim().to_owned())
}

fn install_filter(kept: CapabilitySet) -> Result<(), PrivilegeError> {
    let filters = calls::filters(kept).map_err(|error| PrivilegeError::Filter(error.to_string()))?;
    for filter in &filters {
        seccompiler::apply_filter_all_threads(filter).map_err(|error| PrivilegeError::Filter(error.to_string()))?;
    }
    Ok(())
}
