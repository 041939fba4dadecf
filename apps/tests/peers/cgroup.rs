//! Control groups with limits for a program, below the group of the test.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use wirepath_testlab::eventually;

/// Where the kernel shows control groups.
const ROOT: &str = "/sys/fs/cgroup";

/// A group of one controller (cgroups version 1), or of all (version 2). It is removed when its processes have ended.
pub(crate) struct Cgroup {
    folder: PathBuf,
    is_v2: bool,
}

impl Cgroup {
    /// Creates a group in which the controller limits its processes. Fails with the reason why a test cannot have one.
    pub(crate) fn new(controller: &str) -> Result<Self, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let own = std::fs::read_to_string("/proc/self/cgroup").map_err(|error| format!("needs cgroups: {error}"))?;
        let name = format!("wirepath-test-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let of_v1 = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let has = parts.next()?.split(',').any(|it| it == controller);
            parts.next().filter(|_| has)
        });
        let (parent, is_v2) = match of_v1 {
            Some(path) => (Path::new(ROOT).join(controller).join(path.trim_start_matches('/')), false),
            // Groups with processes have no groups with limits below them, except the root (cgroups(7)).
            None => (PathBuf::from(ROOT), true),
        };
        if is_v2 {
            let enabled = std::fs::read_to_string(parent.join("cgroup.subtree_control")).unwrap_or_default();
            if !enabled.split_whitespace().any(|it| it == controller) {
                return Err(format!("needs the controller {controller} of cgroups in {ROOT}"));
            }
        }
        let folder = parent.join(name);
        std::fs::create_dir(&folder).map_err(|error| format!("needs cgroups: {}: {error}", folder.display()))?;
        Ok(Self { folder, is_v2 })
    }

    /// Returns the file that processes are written to.
    pub(crate) fn processes(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }

    /// Moves a process with all its threads into the group.
    pub(crate) fn add(&self, process: u32) {
        std::fs::write(self.processes(), process.to_string()).expect("a process of the group");
    }

    /// Writes a file, whose name depends on the version.
    pub(crate) fn set(&self, [v1, v2]: [&str; 2], value: &str) {
        let file = self.folder.join(if self.is_v2 { v2 } else { v1 });
        std::fs::write(&file, value).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }

    /// Reads a file.
    pub(crate) fn get(&self, [v1, v2]: [&str; 2]) -> String {
        let file = self.folder.join(if self.is_v2 { v2 } else { v1 });
        std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display())).trim().to_owned()
    }

    /// Returns the number of processes that the kernel has killed for want of memory.
    pub(crate) fn killed_for_memory(&self) -> u64 {
        let text = self.get(["memory.oom_control", "memory.events"]);
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.expect("a count").trim().parse().expect("a number")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process leaves its group some time after it has ended.
        eventually(Duration::from_secs(10), || std::fs::remove_dir(&self.folder).is_ok());
    }
}
