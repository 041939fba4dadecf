use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use wirepath_control_socket::{Access, Peer};
use wirepath_privileges::groups;
use wirepath_settings::{Choice, ConfigError, ConfigTable, Integer, Key, Parsed, Settings, Text, WithDefault};

const SOCKET: Key<Text> = Key::text("socket", "path of a socket, or \"off\" for no socket")
    .absent("PROGRAM-PID.sock in /run/wirepath, or in the user's runtime folder")
    .about("Control socket by which `wirepath` looks into the program. It is relative to the configuration file.");
const MODE: Key<WithDefault<Integer<u32>>> = Key::integer("mode", 0..=0o777)
    .octal()
    .default(0o600)
    .about("Permissions of the socket file. Who may connect may look.");
const GROUP: Key<Text> = Key::text("group", "name of a group in /etc/group, or a number")
    .absent("the group of the program")
    .about("Group of the socket file.");
const CHANGE: Key<WithDefault<Choice<u8>>> = Key::choice(
    "change",
    &[
        ("owner", 0, "the user of the program, and root"),
        ("group", 1, "these and the members of `group`"),
        ("all", 2, "everyone who may connect"),
    ],
)
.default_word("owner")
.needs(&[("group", "group = \"root\"")])
.about("Users that may change the program.");
const METRICS: Key<Parsed<SocketAddr>> =
    Key::parsed("metrics", "an address and port such as \"127.0.0.1:9464\"").absent("no metrics by HTTP").about(
        "Address of metrics by HTTP, for everyone who reaches it. With port 0 the kernel chooses one, which the log \
         names.",
    );

/// Description of the table `[control]`.
pub static CONTROL: ConfigTable = ConfigTable {
    name: "control",
    about: "The control socket of the program, and metrics by HTTP.",
    absent: "every key has its default",
    keys: &[&SOCKET, &MODE, &GROUP, &CHANGE, &METRICS],
    example: "[control]\nmode = 0o660\ngroup = \"root\"\nchange = \"group\"\nmetrics = \"127.0.0.1:9464\"\n",
    ..ConfigTable::EMPTY
};

/// The table `[control]` of a configuration, which [`CONTROL`] describes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControlSettings {
    /// Path of the socket file; `None`: the default path.
    pub socket: Option<PathBuf>,
    /// True if there shall be no socket.
    pub off: bool,
    /// Mode and group of the file. Who may connect may look.
    pub access: Access,
    /// Users that may change the program.
    pub change: MayChange,
    /// Address and port of metrics by HTTP. With port 0 the kernel chooses one, which the log names.
    pub metrics: Option<SocketAddr>,
}

/// Users that may change a running program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum MayChange {
    /// The program's own user and root.
    #[default]
    Owner,
    /// These and the members of a group.
    Group(u32),
    /// Everyone who may connect.
    All,
}

impl ControlSettings {
    /// Reads the table from a configuration's top-level table.
    ///
    /// # Errors
    /// If a value is wrong. The error has its position.
    pub fn read(top: &Settings<'_>) -> Result<Self, ConfigError> {
        top.read_table(&CONTROL, Self::read_table)
    }

    fn read_table(table: &Settings<'_>) -> Result<Self, ConfigError> {
        let span = table.span(&SOCKET);
        let path = table.read(&SOCKET)?;
        if path.as_ref().is_some_and(String::is_empty) {
            return Err(span.error("found \"\", expected the path of a socket, or \"off\""));
        }
        let off = path.as_deref() == Some("off");
        let beside = Path::new(span.file()).parent().unwrap_or_else(|| "".as_ref());
        let socket = path.filter(|_| !off).map(|path| beside.join(path));
        let mode = table.read(&MODE)?;
        let group = group(table)?;
        let change = match (table.read(&CHANGE)?, group) {
            (1, None) => return Err(table.error_in(&CHANGE, "\"group\" needs the key \"group\"")),
            (1, Some(group)) => MayChange::Group(group),
            (2, _) => MayChange::All,
            _ => MayChange::Owner,
        };
        let access = Access { mode, group };
        let metrics = table.read(&METRICS)?;
        Ok(Self { socket, off, access, change, metrics })
    }
}

impl MayChange {
    /// Returns whether a client may change the program.
    pub(super) fn allows(self, peer: &Peer) -> bool {
        match self {
            Self::All => true,
            Self::Owner => peer.is_owner(),
            Self::Group(group) => peer.is_owner() || peer.gid == group || is_member(peer.uid, group),
        }
    }
}

/// Reads `group`: the name of a group in `/etc/group`, or its number.
fn group(table: &Settings<'_>) -> Result<Option<u32>, ConfigError> {
    let Some(name) = table.read(&GROUP)? else { return Ok(None) };
    if let Ok(number) = name.parse() {
        return Ok(Some(number));
    }
    let file = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let number = groups(&file).find(|(group, ..)| *group == name).map(|(_, number, _)| number);
    let unknown = || table.span(&GROUP).error(format!("there is no group \"{name}\" in /etc/group"));
    number.ok_or_else(unknown).map(Some)
}

/// Returns whether a user is a member of a group, by `/etc/passwd` and `/etc/group`.
fn is_member(uid: u32, gid: u32) -> bool {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let (users, file) = (read("/etc/passwd"), read("/etc/group"));
    let user = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, _, number) = (fields.next()?, fields.next()?, fields.next()?);
        (number.parse() == Ok(uid)).then_some(name)
    });
    let Some(user) = user else { return false };
    let mut members =
        groups(&file).filter(|(_, number, _)| *number == gid).flat_map(|(.., members)| members.split(','));
    members.any(|member| member == user)
}

#[cfg(test)]
mod tests {
    use wirepath_settings::Source;

    use super::*;

    fn read(text: &str) -> Result<ControlSettings, String> {
        let source = Source::new("/etc/wirepath/c.toml", format!("[control]\n{text}\n"));
        let document = source.parse().unwrap();
        document.read(ControlSettings::read).map_err(|error| error.to_string())
    }

    #[test]
    fn sockets_have_a_mode_and_a_group() {
        assert_eq!(read("").unwrap(), ControlSettings::default());
        let own = read("socket = 'a.sock'").unwrap();
        assert_eq!(own.socket, Some("/etc/wirepath/a.sock".into()));
        assert_eq!((own.access, own.change), (Access::default(), MayChange::Owner));
        let group = read("mode = 0o660\ngroup = 'root'\nchange = 'group'").unwrap();
        let access = Access { mode: 0o660, group: Some(0) };
        assert_eq!((group.access, group.change), (access, MayChange::Group(0)));
        assert_eq!(read("group = '77'\nchange = 'all'").unwrap().change, MayChange::All);
        let off = read("socket = 'off'").unwrap();
        assert_eq!((off.off, off.socket), (true, None));
        assert_eq!(read("metrics = '[::1]:9464'").unwrap().metrics, Some("[::1]:9464".parse().unwrap()));
        for (text, why) in [
            ("metrics = '9464'", "expected an address and port such as \"127.0.0.1:9464\""),
            ("socket = ''", "expected the path of a socket"),
            ("mode = 0o1777", "expected an integer from 0 to 511"),
            ("group = 'no-such'", "there is no group \"no-such\" in /etc/group"),
            ("change = 'nobody'", "expected one of \"owner\", \"group\", \"all\""),
            ("change = 'group'", "\"group\" needs the key \"group\""),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn members_of_a_group_may_change() {
        let peer = |uid, gid| Peer { uid, gid, pid: 1 };
        assert!(MayChange::Group(77).allows(&peer(65_534, 77)));
        assert!(!MayChange::Group(77).allows(&peer(65_534, 78)));
        assert!(MayChange::Group(77).allows(&peer(0, 0)));
        assert!(!MayChange::Owner.allows(&peer(65_534, 0)) && MayChange::All.allows(&peer(65_534, 65_534)));
        let file = "root:x:0:\nnetops:x:900:alice,bob\nbad\n";
        assert_eq!(groups(file).collect::<Vec<_>>(), [("root", 0, ""), ("netops", 900, "alice,bob")]);
    }
}
