use std::path::Path;

use rustix::process::{Gid, Uid};

/// Most supplementary groups of a user. Linux allows 65536; a file with more lines is cut.
const MAX_GROUPS: usize = 1024;

/// A user of this machine with the groups that `/etc/passwd` and `/etc/group` give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Name, or the number as text.
    pub name: String,
    /// Number.
    pub uid: Uid,
    /// Primary group.
    pub gid: Gid,
    /// Supplementary groups.
    pub groups: Vec<Gid>,
}

impl User {
    /// Finds a user by name or number. `None` if `/etc/passwd` has no such user.
    pub fn find(name: &str) -> Option<Self> {
        let read = |path: &str| std::fs::read_to_string(Path::new(path)).unwrap_or_default();
        Self::find_in(name, &read("/etc/passwd"), &read("/etc/group"))
    }

    /// Finds a user in the texts of passwd(5) and group(5).
    fn find_in(name: &str, users: &str, groups: &str) -> Option<Self> {
        let (name, uid, gid) = users.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let [user, _, uid, gid, ..] = fields[..] else { return None };
            (user == name || uid == name).then_some((user, uid.parse().ok()?, gid.parse().ok()?))
        })?;
        let is_member = |members: &str| members.split(',').any(|member| member == name);
        let groups = self::groups(groups).filter(|(.., members)| is_member(members));
        let groups = groups.map(|(_, number, _)| Gid::from_raw(number));
        Some(Self {
            name: name.to_owned(),
            uid: Uid::from_raw(uid),
            gid: Gid::from_raw(gid),
            groups: groups.take(MAX_GROUPS).collect(),
        })
    }
}

/// Iterates over the lines of `/etc/group` (group(5)): name, number and members.
pub fn groups(file: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    file.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, _, number) = (fields.next()?, fields.next()?, fields.next()?.parse().ok()?);
        Some((name, number, fields.next().unwrap_or_default()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_a_primary_and_other_groups() {
        let users = "root:x:0:0::/root:/bin/sh\nbroken\nwirepath:x:990:980::/run/wirepath:/usr/sbin/nologin\n";
        let groups = "root:x:0:\nrdma:x:107:alice,wirepath\nkvm:x:44:wirepath2\nbroken:x\n";
        let found = User::find_in("wirepath", users, groups).unwrap();
        assert_eq!((found.uid.as_raw(), found.gid.as_raw()), (990, 980));
        assert_eq!(found.groups, [Gid::from_raw(107)]);
        assert_eq!(User::find_in("990", users, groups), Some(found));
        for unknown in ["nobody", "", "x", "broken"] {
            assert_eq!(User::find_in(unknown, users, groups), None, "{unknown}");
        }
    }
}
