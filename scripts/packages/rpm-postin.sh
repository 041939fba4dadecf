systemd-sysusers wirepath.conf
systemd-tmpfiles --create wirepath.conf
if [ -d /run/systemd/system ]; then
    systemctl --system daemon-reload
    if [ "$1" -ge 2 ]; then systemctl try-restart tunnel-gateway.service 'l2fwd@*.service'; fi
fi
exit 0
