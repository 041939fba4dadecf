//! The limit of memory of the program's control group (cgroups(7)).

use std::path::{Path, PathBuf};

/// Where the kernel shows control groups.
const ROOT: &str = "/sys/fs/cgroup";
/// Limits from here on are none: version 1 writes the largest number of pages.
const NONE: u64 = 1 << 62;

/// Returns the least limit in bytes of the group of this process and of those above it, with the file that has it.
/// `None`: there is no limit, or it is not visible.
pub(super) fn least() -> Option<(u64, PathBuf)> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    least_of(&groups, |file| std::fs::read_to_string(file).ok())
}

/// Reads the limits of `groups`, which has the form of `/proc/self/cgroup`.
fn least_of(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<(u64, PathBuf)> {
    let mut least: Option<(u64, PathBuf)> = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let (root, file) = if number == "0" && controllers.is_empty() {
            (PathBuf::from(ROOT), "memory.max")
        } else if controllers.split(',').any(|it| it == "memory") {
            (Path::new(ROOT).join("memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        let own = root.join(path.trim_start_matches('/'));
        for group in own.ancestors().take_while(|group| group.starts_with(&root)) {
            let file = group.join(file);
            let limit = read(&file).and_then(|text| text.trim().parse().ok()).filter(|limit| *limit < NONE);
            if let Some(limit) = limit
                && least.as_ref().is_none_or(|(least, _)| limit < *least)
            {
                least = Some((limit, file));
            }
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_all_groups_above() {
        let read = |files: &'static [(&'static str, &'static str)]| {
            move |path: &Path| {
                files.iter().find(|(name, _)| Path::new(name) == path).map(|(_, text)| (*text).to_owned())
            }
        };
        let version_2 = read(&[
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/memory.max", "4096\n"),
            ("/sys/fs/cgroup/memory.max", "8192\n"),
            ("/sys/fs/memory.max", "1\n"),
        ]);
        let file = PathBuf::from("/sys/fs/cgroup/a/memory.max");
        assert_eq!(least_of("0::/a/b\n", version_2), Some((4096, file)));
        assert_eq!(least_of("0::/\n", version_2).map(|(limit, _)| limit), Some(8192));
        let version_1 = read(&[
            ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "5000\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        let groups = "9:name=systemd:/x\n4:cpu,memory:/a\n3:cpuset:/a\n0::/\n";
        assert_eq!(least_of(groups, version_1).map(|(limit, _)| limit), Some(5000));
        assert_eq!(least_of("4:memory:/\n", version_1), None);
        assert_eq!(least_of("", version_1), None);
        assert_eq!(least_of("nothing\n:\n0:\n", version_1), None);
    }
}
