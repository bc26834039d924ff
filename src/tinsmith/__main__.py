from tinsmith.cli import main

main()
