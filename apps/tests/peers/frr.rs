//! Daemons of FRR (Debian: frr) in a namespace.

use tempfile::TempDir;
use wirepath_testlab::{Background, Namespace, Outcome, eventually, run};

use crate::world::WAIT_LIMIT;

/// Commands that prepare a [`wirepath_testlab::LinuxGuest`] for FRR, which looks up its user and has fixed folders.
pub(crate) const PREPARE_GUEST: &str = "
    echo 'root:x:0:0::/:/bin/sh' >/etc/passwd
    printf 'root:x:0:\\nfrrvty:x:100:root\\n' >/etc/group
    mkdir -p /var/run/frr /var/tmp/frr /var/lib/frr
";

/// Returns the command that starts a daemon in a guest. Its configuration is in this folder, and its sockets too.
pub(crate) fn guest_daemon(daemon: &str, folder: &str) -> String {
    format!(
        "{daemon} -d -f {folder}/{daemon}.conf --vty_socket {folder} -i {folder}/{daemon}.pid -z {folder}/zserv -P 0 \
         -u root -g root"
    )
}

/// A namespace for daemons, with a folder for their files.
pub(crate) struct Daemons<'a> {
    namespace: &'a Namespace,
    folder: TempDir,
}

impl<'a> Daemons<'a> {
    /// Writes the configurations, each the name of a daemon and its text.
    pub(crate) fn new(namespace: &'a Namespace, configurations: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for (name, text) in configurations {
            std::fs::write(folder.path().join(format!("{name}.conf")), text).expect("write the configuration");
        }
        // The daemons give up their rights before they make their files.
        run(&["chown", "-R", "frr:frr", &folder.path().display().to_string()]).expect();
        Self { namespace, folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Starts a daemon and waits for its shell. `bfdctl` is true for bfdd, which has a socket more.
    pub(crate) fn start(&self, program: &str, name: &str, bfdctl: bool) -> Background {
        let socket = self.path(&format!("{name}.vty"));
        _ = std::fs::remove_file(&socket);
        let of_daemon = |kind: &str| self.path(&format!("{name}.{kind}"));
        let (config, pid, bfd) = (of_daemon("conf"), of_daemon("pid"), of_daemon("sock"));
        let (folder, zebra) = (self.path(""), self.path("zserv"));
        let mut arguments = vec![program, "--config_file", &config, "--vty_socket", &folder, "--pid_file", &pid];
        arguments.extend(["--socket", &zebra, "--vty_port", "0", "--user", "frr", "--group", "frr"]);
        if bfdctl {
            arguments.extend(["--bfdctl", &bfd]);
        }
        let process = self.namespace.spawn(&arguments);
        assert!(eventually(WAIT_LIMIT, || std::fs::exists(&socket).unwrap_or(false)), "{name} does not start");
        process
    }

    /// Runs commands of FRR's shell.
    pub(crate) fn vtysh(&self, commands: &[&str]) -> Outcome {
        let folder = self.path("");
        let mut arguments = vec!["vtysh", "--vty_socket", &folder];
        commands.iter().for_each(|command| arguments.extend(["-c", command]));
        run(&arguments)
    }
}
