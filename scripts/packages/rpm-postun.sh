if [ -d /run/systemd/system ]; then systemctl --system daemon-reload; fi
exit 0
